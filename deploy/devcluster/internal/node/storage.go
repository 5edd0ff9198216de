package node

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"zerotrain.dev/devcluster/internal/kube"
)

// There is no provisioner: volumes are folders of the instance, made beforehand, which is enough for a cluster of one node. A volume whose
// claim has gone is emptied and offered again.
const (
	storageClass = "local"
	numVolumes   = 24
	volumeSize   = "1Ti" // a limit of nothing: folders share the developer's disk
	podUser      = 65532 // the user of our pods; fsGroup does not apply to folders of the host
	recyclePause = 2 * time.Second
	volumesPath  = "/api/v1/persistentvolumes"
)

func volumeName(index int) string { return fmt.Sprintf("local-%02d", index) }

// CreateStorage makes the storage class and the volumes.
func (n Node) CreateStorage(ctx context.Context, client *kube.Client) error {
	class := map[string]any{
		"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
		"metadata": map[string]any{
			"name":        storageClass,
			"annotations": map[string]string{"storageclass.kubernetes.io/is-default-class": "true"},
		},
		"provisioner":       "kubernetes.io/no-provisioner",
		"volumeBindingMode": "WaitForFirstConsumer",
	}
	if err := client.Create(ctx, "/apis/storage.k8s.io/v1/storageclasses", class); err != nil {
		return err
	}
	for index := range numVolumes {
		if err := n.createVolume(ctx, client, volumeName(index)); err != nil {
			return err
		}
	}
	return nil
}

func (n Node) createVolume(ctx context.Context, client *kube.Client, name string) error {
	folder := n.Instance.Path("volumes", name)
	if err := os.MkdirAll(folder, 0o770); err != nil {
		return err
	}
	if !n.Settings.UserMode { // where there is one user id only, every pod runs as that
		if err := os.Chown(folder, podUser, podUser); err != nil {
			return err
		}
	}
	return client.Create(ctx, volumesPath, map[string]any{
		"apiVersion": "v1", "kind": "PersistentVolume",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"capacity":                      map[string]string{"storage": volumeSize},
			"accessModes":                   []string{"ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"},
			"persistentVolumeReclaimPolicy": "Retain",
			"storageClassName":              storageClass,
			"hostPath":                      map[string]string{"path": inside("volumes", name), "type": "Directory"},
		},
	})
}

type volume struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// RecycleVolumes offers released volumes again until ctx ends.
func (n Node) RecycleVolumes(ctx context.Context, client *kube.Client) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(recyclePause):
		}
		if err := n.recycleOnce(ctx, client); err != nil && ctx.Err() == nil {
			log.Printf("volumes: %v", err) // the API server may be stopped on purpose; the next round sees
		}
	}
}

func (n Node) recycleOnce(ctx context.Context, client *kube.Client) error {
	var list struct {
		Items []volume `json:"items"`
	}
	if err := client.Get(ctx, volumesPath, &list); err != nil {
		return err
	}
	present := map[string]bool{}
	for _, each := range list.Items {
		present[each.Metadata.Name] = true
		if each.Status.Phase != "Released" {
			continue
		}
		err := client.Delete(ctx, volumesPath+"/"+each.Metadata.Name)
		if status := (*kube.StatusError)(nil); errors.As(err, &status) && status.Code == http.StatusNotFound {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	// A volume is emptied once it is gone from the API, so that nobody can bind it in between.
	for index := range numVolumes {
		name := volumeName(index)
		if present[name] {
			continue
		}
		if err := os.RemoveAll(n.Instance.Path("volumes", name)); err != nil {
			return err
		}
		if err := n.createVolume(ctx, client, name); err != nil {
			return err
		}
	}
	return nil
}
