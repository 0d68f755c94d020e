// Package differential pins the real kube-apiserver, which scripts/differential compares ours with.
package differential

import (
	_ "k8s.io/api/core/v1" // its module has a serialized object of each kind
	_ "k8s.io/kubernetes/cmd/kube-apiserver/app"
)
