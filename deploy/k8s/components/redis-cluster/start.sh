# A folder of its own: what a single server left would be taken for slots of this one.
set -eu
mkdir -p /data/cluster
exec valkey-server /etc/valkey/valkey.conf --include /etc/seqgate/cluster.conf \
  --dir /data/cluster --cluster-announce-hostname "$HOSTNAME.seqgate-valkey"
