#!/bin/sh
# Enlarge a workload's volumes: deploy/k8s/enlarge.sh [options] STATEFULSET SIZE
#
#   enlarge.sh seqgate-ledger 200Gi
#
#   --namespace NAME     default: seqgate
#   --yes                do not ask
#
# The StorageClass must allow it (allowVolumeExpansion). Set the same size in the overlay first: the
# claims of a StatefulSet cannot be changed in place, so the StatefulSet is deleted without its pods,
# which go on, and the next apply makes it anew and adopts them. If a step fails, run it again.
set -eu
namespace=seqgate yes=
while [ $# -gt 0 ]; do
    case $1 in
    --namespace) namespace=$2 && shift 2 ;;
    --yes) yes=yes && shift ;;
    --*) echo "unknown option: $1" >&2 && exit 2 ;;
    *) break ;;
    esac
done
[ $# = 2 ] || { echo "usage: enlarge.sh [options] STATEFULSET SIZE" >&2 && exit 2; }
name=$1 size=$2

k() { kubectl --namespace "$namespace" "$@"; }
refuse() { echo "refused: $1" >&2 && exit 1; }

claims=$(k get persistentvolumeclaims --output name | grep "/data-$name-[0-9]*\$") ||
    refuse "$name has no claims"
for each in $claims; do
    class=$(k get "$each" --output 'jsonpath={.spec.storageClassName}')
    may=$(kubectl get storageclass "$class" --output 'jsonpath={.allowVolumeExpansion}')
    [ "$may" = true ] || refuse "StorageClass $class does not allow volume expansion"
    # The API server refuses a smaller size, and says so.
    k patch "$each" --dry-run=server --type merge --patch \
        "{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"$size\"}}}}" >/dev/null
done
context=$(kubectl config current-context)
echo "In $context, namespace $namespace, this sets $size for"
echo "$claims"
echo "and deletes statefulset/$name, not its pods. Apply the overlay with $size afterwards."
if [ ! "$yes" ]; then
    printf 'Go on? [y/N] '
    read -r answer
    [ "$answer" = y ] || exit 1
fi
for each in $claims; do
    k patch "$each" --type merge --patch \
        "{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"$size\"}}}}"
done
k delete "statefulset/$name" --cascade=orphan --ignore-not-found
