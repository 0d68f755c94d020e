// Package stock pins the version of Kubernetes' controller manager, scheduler and proxy: scripts/test-stock and the
// benchmarks run them.
package stock

import (
	_ "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	_ "k8s.io/kubernetes/cmd/kube-proxy/app"
	_ "k8s.io/kubernetes/cmd/kube-scheduler/app"
)
