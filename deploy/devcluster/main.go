package main

import (
	"os"

	"zerotrain.dev/devcluster/internal/components"
)

func main() {
	if len(os.Args) > 1 {
		if run := components.Lookup(os.Args[1]); run != nil {
			os.Args = os.Args[1:]
			os.Exit(run())
		}
	}
}
