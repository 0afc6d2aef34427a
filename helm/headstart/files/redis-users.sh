# Writes the ACL file of the built-in Redis: three users, each with only the rights it needs.
set -eu
digest() { # without the white space around it, as gateways and workers read it
  printf %s "$(sed 's/^[[:space:]]*//; s/[[:space:]]*$//' "$1")" | sha256sum | cut -d ' ' -f 1
}
umask 077
cat > /run/redis/users.acl <<EOF
user default off resetkeys resetchannels -@all
user probe on nopass resetkeys resetchannels -@all +ping
user $GATEWAY_USER on #$(digest /passwords/gateway) resetkeys resetchannels %R~{$PREFIX:*}:* ~{$PREFIX:0}:limits:* -@all +ping +hello +auth +select +time +get +getrange +memory|usage +hlen +hkeys +hstrlen +hgetall +hmget +hvals +sismember +smismember +scard +evalsha_ro +script|load +eval +hset +hdel +expire +del
user $WORKER_USER on #$(digest /passwords/worker) resetkeys resetchannels ~{$PREFIX:*}:* -@all +ping +hello +auth +select +time +multi +exec +discard +memory|usage +hlen +hkeys +hstrlen +hget +hmget +hgetall +hexists +hset +hdel +sadd +srem +smismember +scard +set +pexpire +unlink
EOF
