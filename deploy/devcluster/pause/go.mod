module zerotrain.dev/devcluster/pause

go 1.26.0
