# Use a separate folder: a single server's leftover data would be taken for this node's slots.
set -eu
mkdir -p /data/cluster
exec valkey-server /etc/valkey/valkey.conf --include /etc/seqgate/cluster.conf \
  --dir /data/cluster --cluster-announce-hostname "$HOSTNAME.seqgate-valkey"
