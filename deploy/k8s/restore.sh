#!/bin/sh
# Restore a backup of the cursors and the log: deploy/k8s/restore.sh [options] FOLDER
#
#   FOLDER               has cursor.backup and ledger.backup, as backup.sh writes them
#   --namespace NAME     default: seqgate
#   --flush COMMAND      empties a Redis that is not in this namespace
#   --yes                do not ask
#
# It stops the services, writes the backups into the stores' volumes, empties Valkey, and starts what
# it stopped. No store is changed before both backups have arrived whole. If a step fails, run it
# again: it does the rest, and starts what it had stopped.
set -eu
namespace=seqgate flush='' yes=''
while [ $# -gt 0 ]; do
    case $1 in
    --namespace) namespace=$2 && shift 2 ;;
    --flush) flush=$2 && shift 2 ;;
    --yes) yes=yes && shift ;;
    --*) echo "unknown option: $1" >&2 && exit 2 ;;
    *) break ;;
    esac
done
[ $# = 1 ] || { echo "usage: restore.sh [options] FOLDER" >&2 && exit 2; }
folder=$1
note=seqgate/replicas-before-restore
stopped="statefulset/seqgate-dispatcher statefulset/seqgate-ledger deployment/seqgate-dedup statefulset/seqgate-cursor"
started="statefulset/seqgate-cursor deployment/seqgate-dedup statefulset/seqgate-ledger statefulset/seqgate-dispatcher"
stores="cursor ledger"

k() { kubectl --namespace "$namespace" "$@"; }
refuse() { echo "refused: $1" >&2 && exit 1; }
# kubectl's template of one field; empty if it is not set.
field() { k get "$1" --output "jsonpath=$2"; }

# What cannot be restored is refused before anything is stopped.
for store in $stores; do
    file=$folder/$store.backup
    [ -s "$file" ] || refuse "$file is missing or empty"
    [ "$(dd if="$file" bs=15 count=1 2>/dev/null)" = "SQLite format 3" ] || refuse "$file is no SQLite database"
    k get "persistentvolumeclaim/data-seqgate-$store-0" --output name >/dev/null ||
        refuse "there is no volume of seqgate-$store-0: logs in PostgreSQL are restored there"
    image=$(field "statefulset/seqgate-$store" '{.spec.template.spec.containers[0].image}')
    [ "$image" ] || refuse "statefulset/seqgate-$store names no image"
done
for each in $stopped; do field "$each" '{.kind}' >/dev/null || refuse "there is no $each"; done
valkeys=$(k get pods --selector app.kubernetes.io/component=valkey --output name)
[ "$valkeys$flush" ] || refuse "there is no Valkey: say with --flush how to empty your Redis"

context=$(kubectl config current-context)
echo "In $context, namespace $namespace, this"
echo "  1. stops dispatcher, ledger, dedup and cursor,"
echo "  2. replaces the databases of cursor and ledger by those in $folder,"
echo "  3. empties Valkey, which is rebuilt from the log,"
echo "  4. starts what it stopped."
echo "What was published or acknowledged since the backup is forgotten."
if [ ! "$yes" ]; then
    printf 'Go on? [y/N] '
    read -r answer
    [ "$answer" = y ] || exit 1
fi

# However it ends, no pod of its own stays.
pod() { echo "seqgate-$1-restore"; }
remove_pods() {
    k delete pod "$(pod cursor)" "$(pod ledger)" --ignore-not-found --wait=true >/dev/null
}
trap 'remove_pods || true' EXIT
trap 'exit 1' HUP INT TERM

# The numbers of replicas are kept on the workloads: a second run finds them there.
for each in $stopped; do
    replicas=$(field "$each" '{.spec.replicas}')
    if [ "${replicas:-1}" != 0 ]; then
        k annotate "$each" "$note=${replicas:-1}" --overwrite >/dev/null
    fi
done
echo "stopping"
for each in $stopped; do k scale "$each" --replicas=0 >/dev/null; done
for name in dispatcher ledger dedup cursor; do
    k wait --for=delete pod --timeout=300s --selector \
        "app.kubernetes.io/name=seqgate,app.kubernetes.io/component=$name" >/dev/null
done

remove_pods
for store in $stores; do
    image=$(field "statefulset/seqgate-$store" '{.spec.template.spec.containers[0].image}')
    sed -e "s#STORE#$store#" -e "s#IMAGE#$image#" "$(dirname "$0")/restore-pod.yaml" |
        k apply --filename - >/dev/null
done
for store in $stores; do
    echo "writing $store.backup"
    k wait --for=condition=Ready "pod/$(pod "$store")" --timeout=300s >/dev/null
    k exec --stdin "$(pod "$store")" -- sh -c 'cat >/data/restore.new' <"$folder/$store.backup"
    there=$(k exec "$(pod "$store")" -- cksum /data/restore.new)
    here=$(cksum <"$folder/$store.backup")
    [ "${there% /data/restore.new}" = "$here" ] ||
        refuse "$store.backup arrived damaged; the stores are unchanged"
done
# A database and its write-ahead log belong together: the log goes first.
for store in $stores; do
    k exec "$(pod "$store")" -- sh -c \
        "cd /data && rm -f $store.db-wal $store.db-shm && mv restore.new $store.db && sync"
done
echo "emptying Valkey"
for each in $valkeys; do
    # A replica refuses, and is emptied by its master.
    said=$(k exec "$each" --container valkey -- valkey-cli FLUSHALL)
    case $said in OK* | READONLY*) ;; *) refuse "$each does not empty itself: $said" ;; esac
done
[ ! "$flush" ] || sh -c "$flush"

remove_pods
echo "starting"
for each in $started; do
    replicas=$(field "$each" "{.metadata.annotations.seqgate/replicas-before-restore}")
    # With a HorizontalPodAutoscaler, too: it leaves what is at 0 at 0.
    k scale "$each" --replicas="${replicas:-1}" >/dev/null
done
for each in $started; do
    k rollout status "$each" --timeout=600s
    k annotate "$each" "$note-" >/dev/null
done
echo "restored"
