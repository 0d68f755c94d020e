//! Services with addresses of the pool.

use std::net::IpAddr;

use crate::object::Service;

/// The class of services that get addresses of the pool.
pub(crate) const CLASS: &str = "coracle.dev/address-pool";

/// Whether the service gets addresses of the pool.
pub(crate) fn is_ours(service: &Service) -> bool {
    let spec = &service.spec;
    spec.type_.as_deref() == Some("LoadBalancer") && spec.load_balancer_class.as_deref() == Some(CLASS)
}

/// The addresses in the service's status.
pub(crate) fn addresses(service: &Service) -> impl Iterator<Item = IpAddr> {
    let balancer = service.status.load_balancer.as_ref();
    let all = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    all.filter_map(|entry| entry.ip.as_deref()?.parse().ok())
}
