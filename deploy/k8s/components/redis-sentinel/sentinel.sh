# A Sentinel writes its identity and its view into its configuration file, which must outlast the
# pod.
set -eu
file=/data/sentinel.conf
if [ ! -s "$file" ]; then
  cat /etc/seqgate/sentinel.conf > "$file.new"
  echo "sentinel announce-ip $HOSTNAME.seqgate-valkey" >> "$file.new"
  mv "$file.new" "$file"
fi
exec valkey-server "$file" --sentinel
