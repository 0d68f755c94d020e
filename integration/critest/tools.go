// Package critest pins the published critest and crictl, which scripts/critest builds unmodified.
package critest

import _ "sigs.k8s.io/cri-tools/cmd/crictl"
