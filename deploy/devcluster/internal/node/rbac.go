package node

import (
	"context"

	"zerotrain.dev/devcluster/internal/kube"
)

// CreateRoles gives CoreDNS the right to read what it answers from. (kube-proxy's and the kubelet's roles are built into the API server.)
func CreateRoles(ctx context.Context, client *kube.Client) error {
	const group = "rbac.authorization.k8s.io"
	rule := func(apiGroup string, resources ...string) map[string]any {
		return map[string]any{"apiGroups": []string{apiGroup}, "resources": resources, "verbs": []string{"get", "list", "watch"}}
	}
	metadata := map[string]any{"name": "system:coredns"}
	role := map[string]any{
		"apiVersion": group + "/v1", "kind": "ClusterRole", "metadata": metadata,
		"rules": []any{rule("", "endpoints", "services", "pods", "namespaces"), rule("discovery.k8s.io", "endpointslices")},
	}
	if err := client.Create(ctx, "/apis/"+group+"/v1/clusterroles", role); err != nil {
		return err
	}
	return client.Create(ctx, "/apis/"+group+"/v1/clusterrolebindings", map[string]any{
		"apiVersion": group + "/v1", "kind": "ClusterRoleBinding", "metadata": metadata,
		"roleRef":  map[string]string{"apiGroup": group, "kind": "ClusterRole", "name": "system:coredns"},
		"subjects": []any{map[string]string{"apiGroup": group, "kind": "User", "name": "system:coredns"}},
	})
}
