//! The port that a probe connects to, and the user agent that it sends.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// User agent of HTTP and gRPC probes, as in the kubelet.
pub(super) const USER_AGENT: &str = "kube-probe/1.36";

/// A port by number, or by the container's name for it.
pub(crate) fn port(port: &IntOrString, container: &Container) -> Option<u16> {
    match port {
        IntOrString::Int(number) => u16::try_from(*number).ok(),
        IntOrString::String(name) => {
            let named = container.ports.iter().flatten().find(|p| p.name.as_ref() == Some(name));
            let number = named.and_then(|p| u16::try_from(p.container_port).ok());
            number.or_else(|| name.parse().ok())
        }
    }
}
