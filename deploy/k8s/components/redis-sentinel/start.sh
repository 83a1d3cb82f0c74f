# Follow the master that a Sentinel names. If none names one, there is no master yet: the first pod
# becomes it.
set -eu
me=$HOSTNAME.seqgate-valkey
master=seqgate-valkey-0.seqgate-valkey
for pod in 0 1 2; do
  named=$(timeout 3 valkey-cli -h "seqgate-valkey-$pod.seqgate-valkey" -p 26379 \
    sentinel get-master-addr-by-name seqgate 2>/dev/null | head -n 1) || true
  case $named in seqgate-valkey-*) master=$named && break ;; esac
done
set -- /etc/valkey/valkey.conf --replica-announce-ip "$me"
[ "$master" = "$me" ] || set -- "$@" --replicaof "$master" 6379
exec valkey-server "$@"
