package kube

import (
	"context"
	"fmt"
	"time"
)

// Node is what the supervisor reads of a Node object.
type Node struct {
	Spec struct {
		Taints []struct {
			Key string `json:"key"`
		} `json:"taints"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// IsSchedulable tells whether the node is Ready and the node lifecycle controller has taken its first taints away.
func (n Node) IsSchedulable() bool {
	for _, condition := range n.Status.Conditions {
		if condition.Type == "Ready" && condition.Status == "True" {
			return len(n.Spec.Taints) == 0
		}
	}
	return false
}

// AwaitNode waits until pods can be scheduled on the node.
func (c *Client) AwaitNode(ctx context.Context, name string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		var node Node
		if err := c.Get(ctx, "/api/v1/nodes/"+name, &node); err == nil && node.IsSchedulable() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("node %s is not Ready after %s: %s", name, timeout, node.whyNot())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (n Node) whyNot() string {
	for _, condition := range n.Status.Conditions {
		if condition.Type == "Ready" && condition.Status != "True" {
			return condition.Message
		}
	}
	return "its kubelet has not reported yet, or it carries a taint"
}
