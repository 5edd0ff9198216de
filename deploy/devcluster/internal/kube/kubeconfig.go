package kube

import (
	"encoding/base64"
	"encoding/json"
	"os"
)

// Access is what a kubeconfig holds: the server, how to verify it, and who the user is (a token, or a certificate).
type Access struct {
	Name     string
	Server   string
	CAPath   string
	Token    string
	CertPath string
	KeyPath  string
}

// WriteKubeconfig writes a self-contained kubeconfig (JSON, which is YAML), readable by its owner alone.
func WriteKubeconfig(path string, access Access) error {
	ca, err := encodeFile(access.CAPath)
	if err != nil {
		return err
	}
	user := map[string]string{}
	if access.Token != "" {
		user["token"] = access.Token
	} else {
		if user["client-certificate-data"], err = encodeFile(access.CertPath); err != nil {
			return err
		}
		if user["client-key-data"], err = encodeFile(access.KeyPath); err != nil {
			return err
		}
	}
	named := func(kind string, value any) []any {
		return []any{map[string]any{"name": access.Name, kind: value}}
	}
	text, err := json.MarshalIndent(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": access.Name,
		"clusters":        named("cluster", map[string]string{"server": access.Server, "certificate-authority-data": ca}),
		"users":           named("user", user),
		"contexts":        named("context", map[string]string{"cluster": access.Name, "user": access.Name}),
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o600)
}

func encodeFile(path string) (string, error) {
	content, err := os.ReadFile(path)
	return base64.StdEncoding.EncodeToString(content), err
}
