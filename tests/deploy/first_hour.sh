# What a newcomer types, in an empty folder, once Seqgate is installed: sh first_hour.sh PORT
set -eu

seqgate dev --data data --port-base "$1" >dev.log 2>&1 &
dev=$!
trap 'kill $dev; wait $dev' EXIT
until grep -q "In another terminal" dev.log; do
    kill -0 $dev || { cat dev.log; exit 1; }
    sleep 0.1
done
eval "$(grep export dev.log)"

seqgate publish orders "2 apples" --key alice --producer shop --sequence-id 1
kill -9 "$(sed -n 's/^ledger .*(process \([0-9]*\))/\1/p' dev.log)"
seqgate publish orders "2 apples" --key alice --producer shop --sequence-id 1
seqgate dedup explain orders shop 1
seqgate publish orders "1 pear" --key bob
printf 'three\nfour\n' >lines
seqgate publish orders --key alice --file lines
seqgate publish orders --key alice --file lines
seqgate consume orders billing --from earliest -n 4 -o json
seqgate topic show orders
