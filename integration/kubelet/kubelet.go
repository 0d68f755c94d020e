// Package kubelet pins the published kubelet, which scripts/kubelet builds unmodified.
package kubelet

import _ "k8s.io/kubernetes/cmd/kubelet/app"
