#!/bin/sh
# The overlay makes this executable.
echo "tiny"
