// Package stock pins the version of Kubernetes' controller manager and scheduler that scripts/test-stock runs on our API
// server.
package stock

import (
	_ "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	_ "k8s.io/kubernetes/cmd/kube-scheduler/app"
)
