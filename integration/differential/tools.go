// Package differential pins the version of kube-apiserver that scripts/differential compares with our API server.
package differential

import (
	_ "k8s.io/api/core/v1" // its module has a serialized object of each kind
	_ "k8s.io/kubernetes/cmd/kube-apiserver/app"
)
