package kube

// Node is what the supervisor reads of a Node object.
type Node struct {
	Spec struct {
		Taints []struct {
			Key string `json:"key"`
		} `json:"taints"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
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
