#!/bin/sh
# Starts the run that a configuration file describes, or continues it after a restart:
#   start-server.sh CONFIG RUN [options of protofed deploy server]
set -eu
config=$1
run=$2
shift 2
if [ -e "$run/run.json" ]; then
    exec protofed deploy server --resume --out "$run" "$@"
fi
exec protofed deploy server --config "$config" --out "$run" "$@"
