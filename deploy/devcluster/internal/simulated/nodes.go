package simulated

import (
	"context"
	"fmt"
	"time"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/kube"
)

const managedAnnotation = "kwok.x-k8s.io/node"

// A node of the kind that people train on: 8 GPUs, NVMe-sized ephemeral storage, one of three zones in turn.
var zones = []string{"zone-a", "zone-b", "zone-c"}

const readyTimeout = 60 * time.Second

func nodeName(index int) string { return fmt.Sprintf("node-%d", index) }

func nodeObject(index int, settings instance.Settings) map[string]any {
	name := nodeName(index)
	resources := map[string]string{
		"cpu":               "64",
		"memory":            "512Gi",
		"ephemeral-storage": "3500Gi",
		"pods":              "110",
		"nvidia.com/gpu":    fmt.Sprint(settings.GPUsPerNode),
	}
	return map[string]any{
		"apiVersion": "v1",
		"kind":       "Node",
		"metadata": map[string]any{
			"name":        name,
			"annotations": map[string]string{managedAnnotation: "fake"},
			"labels": map[string]string{
				"kubernetes.io/hostname":        name,
				"kubernetes.io/os":              "linux",
				"kubernetes.io/arch":            "amd64",
				"topology.kubernetes.io/region": "region-1",
				"topology.kubernetes.io/zone":   zones[index%len(zones)],
				"nvidia.com/gpu.product":        "SIMULATED-GPU",
				"nvidia.com/gpu.count":          fmt.Sprint(settings.GPUsPerNode),
				"type":                          "simulated",
			},
		},
		"status": map[string]any{"capacity": resources, "allocatable": resources},
	}
}

// CreateNodes registers the nodes and waits until kwok has made all of them Ready and their taints are gone.
func CreateNodes(ctx context.Context, client *kube.Client, settings instance.Settings) error {
	for index := range settings.NumNodes {
		if err := client.Create(ctx, "/api/v1/nodes", nodeObject(index, settings)); err != nil {
			return fmt.Errorf("node %s: %w", nodeName(index), err)
		}
	}
	for index := range settings.NumNodes {
		if err := client.AwaitNode(ctx, nodeName(index), readyTimeout); err != nil {
			return err
		}
	}
	return nil
}
