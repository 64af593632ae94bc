"""`python -m cluster.cli`: the command line where the `shardserve` script is not on the path."""

from cluster.cli import main

main()
