#!/bin/sh
# Install a new version, or changed settings: deploy/k8s/upgrade.sh [--yes] OVERLAY ...
#
# It shows what changes, applies the overlays (folders), and waits until every workload runs it. If a
# step fails, run it again. What the API server refuses is refused before anything changes.
set -eu
yes=
[ "${1:-}" != --yes ] || { yes=yes && shift; }
[ $# -gt 0 ] || { echo "usage: upgrade.sh [--yes] OVERLAY ..." >&2 && exit 2; }

refuse() { echo "refused: $1" >&2 && exit 1; }
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
trap 'exit 1' HUP INT TERM

for each in "$@"; do
    kubectl kustomize "$each" >>"$made/all.yaml" || refuse "$each does not render"
    echo --- >>"$made/all.yaml"
done
# Before the first installation there is no namespace in which to try.
namespaces=$(sed -n 's/^  namespace: //p' "$made/all.yaml" | sort -u)
for each in $namespaces; do
    kubectl get namespace "$each" --output name >/dev/null ||
        refuse "there is no namespace $each: install with kubectl apply --kustomize"
    cut_off=$(kubectl --namespace "$each" get deployments,statefulsets --output \
        'jsonpath={.items[*].metadata.annotations.seqgate/replicas-before-restore}')
    [ ! "$cut_off" ] || refuse "a restore in $each was cut off: run restore.sh again"
done
kubectl apply --dry-run=server --filename "$made/all.yaml" >/dev/null ||
    refuse "the API server does not accept it; for a larger volume, see enlarge.sh"

context=$(kubectl config current-context)
status=0
kubectl diff --filename "$made/all.yaml" >"$made/diff" || status=$?
[ "$status" -le 1 ] || refuse "the difference to what is installed is not known"
if [ "$status" = 0 ]; then
    echo "In $context nothing changes."
else
    echo "In $context this changes:"
    sed -n 's/^diff .*\/\([^/]*\)$/  \1/p; s/^\([+-]\) *\(image: .*\)/    \1 \2/p' "$made/diff"
    if [ ! "$yes" ]; then
        printf 'Go on? [y/N] '
        read -r answer
        [ "$answer" = y ] || exit 1
    fi
    kubectl apply --filename "$made/all.yaml"
fi
for namespace in $namespaces; do
    workloads=$(kubectl --namespace "$namespace" get deployments,statefulsets --output name \
        --selector app.kubernetes.io/name=seqgate)
    for each in $workloads; do
        kubectl --namespace "$namespace" rollout status "$each" --timeout=900s
    done
done
