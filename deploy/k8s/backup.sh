#!/bin/sh
# Back the cursors and the log up: deploy/k8s/backup.sh [--namespace NAME] FOLDER
#
# It writes cursor.backup and ledger.backup into FOLDER, which must not have them. The services keep
# running; the volumes need room for a second copy, which is removed. Cursors come first, so that no
# cursor and no snapshot is ahead of its log.
set -eu
namespace=seqgate
[ "${1:-}" != --namespace ] || { namespace=$2 && shift 2; }
[ $# = 1 ] || { echo "usage: backup.sh [--namespace NAME] FOLDER" >&2 && exit 2; }
folder=$1

k() { kubectl --namespace "$namespace" "$@"; }
refuse() { echo "refused: $1" >&2 && exit 1; }

mkdir -p "$folder"
for store in cursor ledger; do
    [ ! -e "$folder/$store.backup" ] || refuse "$folder/$store.backup exists"
done
for store in cursor ledger; do
    pod=seqgate-$store-0 there=/data/$store.backup
    echo "copying the $store"
    k exec "$pod" -- rm -f "$there" # of a run that failed
    k exec "$pod" -- python -c \
        "import apsw; apsw.Connection('/data/$store.db').execute('VACUUM INTO ?', ['$there'])"
    k exec "$pod" -- cat "$there" >"$folder/$store.part"
    sum=$(k exec "$pod" -- cksum "$there")
    [ "${sum% "$there"}" = "$(cksum <"$folder/$store.part")" ] || refuse "$store.part is damaged"
    k exec "$pod" -- rm "$there"
    mv "$folder/$store.part" "$folder/$store.backup"
done
