//! Names of resources that have no domain.

/// Names of resources without a domain whose amounts are whole numbers.
const COUNTS: &[&str] = &[
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "services.nodeports",
    "services.loadbalancers",
];
/// Names of the other resources without a domain.
const AMOUNTS: &[&str] = &[
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.storage",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
];

/// Whether the amounts of a resource without a domain are whole numbers.
pub fn is_counted(name: &str) -> bool {
    COUNTS.contains(&name)
}

/// Whether a quota can limit the resource with this name, which has no domain.
pub fn is_standard(name: &str) -> bool {
    COUNTS.contains(&name)
        || AMOUNTS.contains(&name)
        || name.starts_with("hugepages-")
        || name.starts_with("requests.hugepages-")
}
