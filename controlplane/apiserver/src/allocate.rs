//! Allocation of cluster IPs and node ports. They are allocated when a service is created, and kept until it is
//! deleted.

mod families;

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    ops::RangeInclusive,
    sync::Arc,
};

use coracle_kinds::{Resource, kind::by_kind, validate::Cause};
use coracle_store::{Expect, Guard};
use rand::RngExt as _;
use serde_json::{Value, json};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::{
    cache::{ALLOCATIONS, Allocated, Cache, ServiceCidrRange, key_of},
    error::{ApiError, Result},
    object_meta::text,
    service_range::{ServiceRange, ServiceRanges},
};

/// Number of addresses at the start of a range that are allocated automatically only after all other addresses.
/// Manifests can request them, for example for the cluster's DNS. Source: `calculateRangeOffset` in
/// `pkg/registry/core/service/ipallocator`.
fn static_addresses(range: ServiceRange) -> u128 {
    if range.size() <= 16 { 0 } else { (range.size() / 16).clamp(16, 256) }
}

/// The allocations that limit the choice for one service.
struct UsedAllocations<'a> {
    services: &'a Allocated,
    /// Addresses of IPAddress objects with other managers.
    addresses: &'a Allocated,
    /// Key of the service that is being allocated.
    own: &'a str,
    /// Addresses and ports that the service already has.
    old: OldAllocation,
    /// Ports that were chosen for this service in this call.
    chosen: HashSet<u16>,
    /// Port range for node ports.
    node_ports: &'a RangeInclusive<u16>,
}

/// Addresses and ports of a service before an update. The service keeps them even if they are outside of the ranges.
/// Otherwise, after a change of the ranges, every update would fail, including the removal of finalizers.
#[derive(Default)]
struct OldAllocation {
    /// The cluster IPs.
    addresses: Vec<String>,
    /// Node ports, including the port of health checks.
    ports: HashSet<u16>,
}

impl OldAllocation {
    /// Reads the addresses and ports of a service. A service of type ExternalName has no
    /// allocated addresses and ports.
    fn of(old: &Value) -> Self {
        if old["spec"]["type"] == "ExternalName" {
            return Self::default();
        }
        let spec = &old["spec"];
        let ports = spec["ports"].as_array().into_iter().flatten().filter(|_| has_node_ports(old));
        let ports = ports.map(|port| &port["nodePort"]);
        let health = Some(&spec["healthCheckNodePort"]).filter(|_| needs_health_check(old));
        let number = |port: &Value| u16::try_from(port.as_u64()?).ok().filter(|port| *port != 0);
        Self {
            addresses: families::list(old, "clusterIPs"),
            ports: ports.chain(health).filter_map(number).collect(),
        }
    }
}

impl UsedAllocations<'_> {
    fn has_address(&self, address: IpAddr) -> bool {
        self.services.has_address(address, self.own) || self.addresses.has_address(address, "")
    }

    fn has_port(&self, port: u16) -> bool {
        self.chosen.contains(&port) || self.services.has_port(port, self.own)
    }

    /// Whether the service already has this port, and has not used it for another purpose in this call.
    fn keeps(&self, port: u16) -> bool {
        self.old.ports.contains(&port) && !self.chosen.contains(&port)
    }

    /// An upper bound of the number of used addresses.
    fn addresses(&self) -> usize {
        self.services.addresses() + self.addresses.addresses()
    }
}

/// Permit to allocate addresses and ports. While a clone exists, writes of other services on this server wait. The task
/// that stores the service holds a clone. So a disconnect of the client does not release the permit before the commit.
pub(crate) type Allocating = Option<Arc<Permit>>;

/// The lock within this server, and the guard against other servers. The commit fails if another server has allocated
/// meanwhile.
pub(crate) struct Permit {
    _lock: OwnedMutexGuard<()>,
    /// Revision of the guard at the start of the allocation; 0 if the guard does not exist.
    guard_revision: u64,
}

// === impl Permit ===

impl Permit {
    /// The guard for the commit that stores the allocation.
    pub(crate) fn guard(&self) -> Guard {
        let expect =
            if self.guard_revision == 0 { Expect::Absent } else { Expect::Revision(self.guard_revision) };
        Guard { key: ALLOCATIONS.into(), expect }
    }
}

/// Whether objects of a kind have allocated addresses and ports.
pub(crate) fn is_allocated(kind: &Resource) -> bool {
    kind.kind == "Service" && kind.group.is_empty()
}

/// Allocates addresses and ports of services.
pub(crate) struct Allocator {
    pub(crate) cache: Arc<Cache>,
    /// The configured ranges.
    pub(crate) ranges: ServiceRanges,
    /// Port range for node ports.
    node_ports: RangeInclusive<u16>,
    /// Lock of the allocations. A request holds it until the service is stored.
    lock: Arc<Mutex<()>>,
}

// === impl Allocator ===

impl Allocator {
    pub(crate) fn new(cache: Arc<Cache>, ranges: ServiceRanges, node_ports: RangeInclusive<u16>) -> Self {
        Self { cache, ranges, node_ports, lock: Arc::default() }
    }

    /// Allocates the address and the ports of a new service.
    pub(crate) async fn for_create(&self, kind: &Resource, object: &mut Value) -> Result<Allocating> {
        if !is_allocated(kind) {
            return Ok(None);
        }
        let permit = self.acquire().await;
        self.assign(kind, object, None)?;
        Ok(Some(Arc::new(permit)))
    }

    /// Keeps allocated values that an update omits, and allocates values that the new type needs.
    pub(crate) async fn for_update(
        &self,
        kind: &Resource,
        new: &mut Value,
        old: &Value,
    ) -> Result<Allocating> {
        if !is_allocated(kind) {
            return Ok(None);
        }
        keep_node_ports(new, old);
        if needs_health_check(new) && new["spec"]["healthCheckNodePort"].as_i64().unwrap_or(0) == 0 {
            let kept = old["spec"]["healthCheckNodePort"].clone();
            if needs_health_check(old) && !kept.is_null() {
                new["spec"]["healthCheckNodePort"] = kept;
            }
        }
        let permit = self.acquire().await;
        self.assign(kind, new, Some(old))?;
        Ok(Some(Arc::new(permit)))
    }

    async fn acquire(&self) -> Permit {
        let lock = self.lock.clone().lock_owned().await;
        Permit { _lock: lock, guard_revision: self.cache.allocations() }
    }

    fn assign(&self, kind: &Resource, object: &mut Value, old: Option<&Value>) -> Result<()> {
        if object["spec"]["type"] == "ExternalName" || !object["spec"].is_object() {
            return Ok(());
        }
        let name = text(object, "name").to_owned();
        let own = key_of(kind, text(object, "namespace"), &name);
        let refuse = |field: &str, message: String| {
            let cause = Cause { reason: "FieldValueInvalid", field: field.to_owned(), message };
            ApiError::invalid(kind, &name, &[cause])
        };
        families::synchronize(object, old);
        families::complete(object, old, &self.ranges.families())
            .map_err(|causes| ApiError::invalid(kind, &name, &causes))?;
        let ranges = self.usable_ranges()?;
        let (services, addresses) = (self.cache.of(kind)?, self.cache.of(networking("IPAddress")?)?);
        let (services, addresses) = (services.lock(), addresses.lock());
        let mut used = UsedAllocations {
            services: services.allocated(),
            addresses: addresses.allocated(),
            own: &own,
            old: old.map(OldAllocation::of).unwrap_or_default(),
            chosen: HashSet::new(),
            node_ports: &self.node_ports,
        };
        cluster_ips(object, &ranges, &used).map_err(|message| refuse("spec.clusterIPs", message))?;
        ports(object, &mut used)
            .map_err(|(index, message)| refuse(&format!("spec.ports[{index}].nodePort"), message))?;
        health_port(object, &used).map_err(|message| refuse("spec.healthCheckNodePort", message))
    }

    /// The ranges for new addresses, the configured ranges first.
    fn usable_ranges(&self) -> Result<Vec<ServiceRange>> {
        let cidrs = self.cache.of(networking("ServiceCIDR")?)?;
        let cidrs = cidrs.lock();
        let known: Vec<_> = cidrs.allocated().ranges().collect();
        Ok(self.ranges.iter().flat_map(|configured| usable(configured, &known)).collect())
    }
}

/// Sets the node ports that an update omits to the node ports of the old ports with the same names. A node port that
/// another port of the update has is not used. Source: `patchAllocatedValues` in `pkg/registry/core/service/storage`.
fn keep_node_ports(new: &mut Value, old: &Value) {
    if !allocates_node_ports(new) || !allocates_node_ports(old) {
        return;
    }
    let number = |port: &Value| port["nodePort"].as_i64().unwrap_or(0);
    let before: HashMap<&str, i64> = elements(old).map(|port| (name_of(port), number(port))).collect();
    let taken: HashSet<i64> = elements(new).map(number).collect();
    for port in new["spec"].get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        let kept = before.get(name_of(port)).filter(|kept| !taken.contains(*kept));
        if let Some(kept) = kept.filter(|kept| number(port) == 0 && **kept != 0) {
            port["nodePort"] = (*kept).into();
        }
    }
}

fn elements(service: &Value) -> impl Iterator<Item = &Value> {
    service["spec"]["ports"].as_array().into_iter().flatten()
}

fn name_of(port: &Value) -> &str {
    port["name"].as_str().unwrap_or_default()
}

/// A kind of `networking.k8s.io/v1`.
fn networking(kind: &str) -> Result<&'static Arc<Resource>> {
    by_kind("networking.k8s.io/v1", kind).ok_or_else(ApiError::no_resource)
}

/// Sets the cluster IPs: one for each family of the service. An update cannot change an address: a changed address
/// stays in the object, so that the validation refuses it.
fn cluster_ips(
    object: &mut Value,
    ranges: &[ServiceRange],
    used: &UsedAllocations<'_>,
) -> std::result::Result<(), String> {
    let spec = &mut object["spec"];
    if spec["clusterIP"] == "None" {
        return Ok(());
    }
    let mut all = Vec::new();
    for (index, family) in spec["ipFamilies"].as_array().into_iter().flatten().enumerate() {
        let of_family: Vec<ServiceRange> =
            ranges.iter().filter(|range| *family == range.family()).copied().collect();
        let wanted = spec["clusterIPs"][index].as_str().unwrap_or_default();
        let held = used.old.addresses.get(index).filter(|_| !wanted.is_empty());
        let is_changed = held.is_some_and(|held| held != wanted);
        all.push(if is_changed { wanted.to_owned() } else { address(&of_family, used, wanted)? });
    }
    spec["clusterIP"] = all.first().cloned().unwrap_or_default().into();
    spec["clusterIPs"] = json!(all);
    Ok(())
}

/// The configured range, and the usable ranges of ServiceCIDRs of its family. The configured range is excluded if
/// ServiceCIDRs with this range exist but none of them is usable, for example during a deletion. The configured range
/// is included if no ServiceCIDR has it, for example after a change of the setting.
fn usable(configured: ServiceRange, known: &[ServiceCidrRange]) -> Vec<ServiceRange> {
    let mut same = known.iter().filter(|one| one.range == configured).peekable();
    let is_open = same.peek().is_none() || same.any(|one| one.is_usable);
    let mut all: Vec<ServiceRange> = Some(configured).into_iter().filter(|_| is_open).collect();
    for ServiceCidrRange { range, is_usable } in known {
        if *is_usable && range.is_ipv4() == configured.is_ipv4() && !all.contains(range) {
            all.push(*range);
        }
    }
    all
}

fn address(
    ranges: &[ServiceRange],
    used: &UsedAllocations<'_>,
    wanted: &str,
) -> std::result::Result<String, String> {
    if !wanted.is_empty() && used.old.addresses.iter().any(|held| held == wanted) {
        return Ok(wanted.to_owned());
    }
    if wanted.is_empty() {
        let found = ranges.iter().find_map(|range| free_address(*range, used));
        return found
            .map(|address| address.to_string())
            .ok_or_else(|| "Internal error: range is full".to_owned());
    }
    let invalid = |why: &str| format!("Invalid value: [\"{wanted}\"]: failed to allocate IP {wanted}: {why}");
    let Ok(address) = wanted.parse() else { return Err(invalid("not a valid IP")) };
    if !ranges.iter().any(|range| range.contains(address)) {
        let all: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        return Err(invalid(&format!("the provided IP is not in the valid range {}", all.join(", "))));
    }
    if used.has_address(address) {
        return Err(invalid("provided IP is already allocated"));
    }
    Ok(wanted.to_owned())
}

/// A random free address of a range.
fn free_address(range: ServiceRange, used: &UsedAllocations<'_>) -> Option<IpAddr> {
    let first = 1 + static_addresses(range);
    let end = range.size().saturating_sub(1);
    free_in_band(range, first..end, used).or_else(|| free_in_band(range, 1..first, used))
}

/// A random free address of a part of a range.
fn free_in_band(
    range: ServiceRange,
    band: std::ops::Range<u128>,
    used: &UsedAllocations<'_>,
) -> Option<IpAddr> {
    if band.is_empty() {
        return None;
    }
    let (first, span) = (band.start, band.end - band.start);
    let start = rand::rng().random_range(0..span);
    // The number of candidates is the number of used addresses plus one, so one candidate is free unless the band is
    // full.
    let enough = u128::try_from(used.addresses()).unwrap_or(span).saturating_add(1);
    (0..span.min(enough))
        .filter_map(|step| range.nth(first + (start + step) % span))
        .find(|address| !used.has_address(*address))
}

/// Whether the type has node ports.
fn has_node_ports(object: &Value) -> bool {
    matches!(object["spec"]["type"].as_str(), Some("NodePort" | "LoadBalancer"))
}

/// Whether node ports are allocated for ports that have no node port.
fn allocates_node_ports(object: &Value) -> bool {
    let spec = &object["spec"];
    has_node_ports(object) && (spec["type"] == "NodePort" || spec["allocateLoadBalancerNodePorts"] != false)
}

/// Checks the requested node ports, and allocates missing node ports. Ports with the same number and different
/// protocols share a node port. The error contains the index of the port. Source: `txnAllocNodePorts` in
/// `pkg/registry/core/service/storage/alloc.go`.
fn ports(object: &mut Value, used: &mut UsedAllocations<'_>) -> std::result::Result<(), (usize, String)> {
    if !has_node_ports(object) {
        return Ok(());
    }
    let allocates = allocates_node_ports(object);
    let Some(list) = object["spec"].get_mut("ports").and_then(Value::as_array_mut) else { return Ok(()) };
    // The requested ports come first, so that they are not allocated for other ports of this service.
    let mut own: Vec<(Value, Value, u16)> = Vec::new();
    for (index, port) in list.iter().enumerate() {
        let wanted = port["nodePort"].as_i64().unwrap_or(0);
        if wanted != 0 {
            let number = requested(wanted, used).map_err(|message| (index, message))?;
            own.push((port["port"].clone(), port["protocol"].clone(), number));
        }
    }
    used.chosen.extend(own.iter().map(|(_, _, number)| *number));
    for (index, port) in list.iter_mut().enumerate() {
        if !allocates || port["nodePort"].as_i64().unwrap_or(0) != 0 {
            continue;
        }
        let is_free = |number: u16| {
            !own.iter().any(|(_, protocol, other)| *other == number && *protocol == port["protocol"])
        };
        let shared = own.iter().find(|(of, _, number)| *of == port["port"] && is_free(*number));
        let chosen = match shared {
            Some((_, _, number)) => *number,
            None => any_free(used).ok_or_else(|| (index, "Internal error: range is full".to_owned()))?,
        };
        used.chosen.insert(chosen);
        own.push((port["port"].clone(), port["protocol"].clone(), chosen));
        port["nodePort"] = chosen.into();
    }
    Ok(())
}

/// Whether load balancers check each node for endpoints of the service.
fn needs_health_check(object: &Value) -> bool {
    object["spec"]["type"] == "LoadBalancer" && object["spec"]["externalTrafficPolicy"] == "Local"
}

/// Checks the requested health check port, or allocates a port. The port must differ from the node ports of the
/// service.
fn health_port(object: &mut Value, used: &UsedAllocations<'_>) -> std::result::Result<(), String> {
    if !needs_health_check(object) {
        return Ok(());
    }
    let wanted = object["spec"]["healthCheckNodePort"].as_i64().unwrap_or(0);
    let chosen = match wanted {
        0 => any_free(used).ok_or("Internal error: range is full")?,
        wanted => requested(wanted, used)?,
    };
    object["spec"]["healthCheckNodePort"] = chosen.into();
    Ok(())
}

fn requested(wanted: i64, used: &UsedAllocations<'_>) -> std::result::Result<u16, String> {
    let number = u16::try_from(wanted).ok();
    if let Some(held) = number.filter(|number| used.keeps(*number)) {
        return Ok(held);
    }
    let all = used.node_ports;
    let number = number.filter(|number| all.contains(number));
    let number = number.ok_or_else(|| {
        let why = "provided port is not in the valid range. The range of valid ports is";
        format!("Invalid value: {wanted}: {why} {}-{}", all.start(), all.end())
    })?;
    if used.has_port(number) {
        return Err(format!("Invalid value: {wanted}: provided port is already allocated"));
    }
    Ok(number)
}

/// Number of ports at the start of the range that are allocated automatically only after all other ports. Services can
/// request them. Source: `calculateRangeOffset` in `pkg/registry/core/service/portallocator`.
fn static_ports(range: &RangeInclusive<u16>) -> u16 {
    let size = range.end().saturating_sub(*range.start()).saturating_add(1);
    if size <= 16 { 0 } else { (size / 32).clamp(16, 128) }
}

/// A random free node port.
fn any_free(used: &UsedAllocations<'_>) -> Option<u16> {
    let (first, last) = (*used.node_ports.start(), *used.node_ports.end());
    let dynamic = first + static_ports(used.node_ports);
    free_port(dynamic..=last, used).or_else(|| free_port(first..=dynamic.checked_sub(1)?, used))
}

/// A random free port of a part of the range.
fn free_port(band: RangeInclusive<u16>, used: &UsedAllocations<'_>) -> Option<u16> {
    if band.is_empty() {
        return None;
    }
    let (first, last) = (*band.start(), *band.end());
    let start = rand::rng().random_range(band);
    let mut all = (start..=last).chain(first..start);
    all.find(|port| !used.has_port(*port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE_PORTS: RangeInclusive<u16> = 30000..=32767;

    fn range(network: &str) -> ServiceRange {
        ServiceRange::new(network.parse().unwrap())
    }

    /// The index of services with these addresses and node ports.
    fn services(addresses: &[IpAddr], ports: &[u16]) -> Allocated {
        let mut index = Allocated::default();
        let node_ports: Vec<Value> = ports.iter().map(|port| json!({"nodePort": port})).collect();
        index.add_service("other", &json!({"clusterIPs": addresses, "ports": node_ports}));
        index
    }

    fn chosen(ranges: &[ServiceRange], used: &[IpAddr], wanted: &str) -> std::result::Result<String, String> {
        let (services, addresses) = (services(used, &[]), Allocated::default());
        address(ranges, &allocations(&services, &addresses, &NODE_PORTS), wanted)
    }

    /// The allocations that a new service finds.
    fn allocations<'a>(
        services: &'a Allocated,
        addresses: &'a Allocated,
        node_ports: &'a RangeInclusive<u16>,
    ) -> UsedAllocations<'a> {
        let (old, chosen) = (OldAllocation::default(), HashSet::new());
        UsedAllocations { services, addresses, own: "own", old, chosen, node_ports }
    }

    #[test]
    fn addresses_are_free_and_in_range() {
        for (network, by_hand, elsewhere) in
            [("10.43.0.0/16", "10.43.0.10", "192.168.0.1"), ("fd43::/64", "fd43::a", "10.43.0.1")]
        {
            let range = range(network);
            let mut used = Vec::new();
            for _ in 0..50 {
                let chosen: IpAddr = chosen(&[range], &used, "").unwrap().parse().unwrap();
                assert!(range.contains(chosen) && (0..=256).all(|place| range.nth(place) != Some(chosen)));
                assert!(!used.contains(&chosen));
                used.push(chosen);
            }
            assert_eq!(chosen(&[range], &used, by_hand).unwrap(), by_hand);
            assert!(chosen(&[range], &used, elsewhere).unwrap_err().contains("not in the valid range"));
            let held = used[0].to_string();
            assert!(chosen(&[range], &used, &held).unwrap_err().contains("already allocated"));
        }
    }

    #[test]
    fn the_static_ports_are_allocated_last() {
        assert_eq!(
            [30000..=30015, 30000..=30031, 30000..=32767].map(|range| static_ports(&range)),
            [0, 16, 86]
        );
        let (addresses, mut taken) = (Allocated::default(), Vec::new());
        let node_ports = 30000..=30031;
        for number in 1..=32 {
            let services = services(&[], &taken);
            let port = any_free(&allocations(&services, &addresses, &node_ports)).unwrap();
            assert_eq!(port < 30016, number > 16, "{number}: {port}");
            taken.push(port);
        }
        let services = services(&[], &taken);
        assert_eq!(any_free(&allocations(&services, &addresses, &node_ports)), None, "all ports are used");
    }

    #[test]
    fn the_static_addresses_are_allocated_last() {
        let range = range("10.0.0.0/26");
        let mut used = Vec::new();
        for number in 1..=62 {
            let address: IpAddr = chosen(&[range], &used, "").unwrap().parse().unwrap();
            let is_static = (1..=16).any(|place| range.nth(place) == Some(address));
            assert_eq!(is_static, number > 46, "{number}: {address}");
            used.push(address);
        }
        assert!(chosen(&[range], &used, "").is_err());
    }

    #[test]
    fn a_full_range_is_an_error_unless_there_is_another() {
        for (network, more) in [("10.0.0.0/30", "10.0.1.0/24"), ("fd43::/126", "fd44::/64")] {
            let mut used = Vec::new();
            for _ in 0..2 {
                used.push(chosen(&[range(network)], &used, "").unwrap().parse().unwrap());
            }
            assert!(chosen(&[range(network)], &used, "").is_err());
            let next = chosen(&[range(network), range(more)], &used, "").unwrap();
            assert!(range(more).contains(next.parse().unwrap()), "{next}");
        }
    }

    #[test]
    fn a_service_keeps_what_it_has_without_a_check() {
        let old = json!({"spec": {"type": "NodePort", "clusterIPs": ["10.1.0.9"],
            "ports": [{"port": 80, "nodePort": 22}, {"port": 81, "nodePort": 30001}]}});
        let (services, addresses) =
            (services(&["10.1.0.9".parse().unwrap()], &[30001, 30002]), Allocated::default());
        let used = |old: &Value| UsedAllocations {
            old: OldAllocation::of(old),
            ..allocations(&services, &addresses, &NODE_PORTS)
        };
        let open = [range("10.0.0.0/24")];
        assert_eq!(address(&open, &used(&old), "10.1.0.9").unwrap(), "10.1.0.9");
        assert!(address(&open, &used(&old), "10.1.0.10").is_err(), "another address of the closed range");
        assert_eq!([22, 30001].map(|port| requested(port, &used(&old))), [Ok(22), Ok(30001)]);
        assert!([23, 30002].iter().all(|port| requested(*port, &used(&old)).is_err()));
        let mut named = old.clone();
        named["spec"]["type"] = "ExternalName".into();
        assert!(address(&open, &used(&named), "10.1.0.9").is_err(), "the address was never allocated");
        assert!(requested(30001, &used(&named)).is_err());
    }

    #[test]
    fn usable_ranges_of_the_family_extend_the_configured_one() {
        let configured = range("10.43.0.0/16");
        let of = |known: &[(&str, bool)]| {
            let known = known.iter().map(|(network, is_usable)| (range(network), *is_usable));
            let known: Vec<_> =
                known.map(|(range, is_usable)| ServiceCidrRange { range, is_usable }).collect();
            usable(configured, &known).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), ["10.43.0.0/16"]);
        let all =
            [("10.43.0.0/16", true), ("10.9.0.0/24", true), ("fd00::/64", true), ("10.8.0.0/24", false)];
        assert_eq!(of(&all), ["10.43.0.0/16", "10.9.0.0/24"]);
        assert_eq!(of(&[("10.43.0.0/16", false), ("10.9.0.0/24", true)]), ["10.9.0.0/24"]);
        assert_eq!(of(&[("10.43.0.0/16", false), ("10.43.0.0/16", true)]), ["10.43.0.0/16"]);
    }

    fn allocated(mut spec: Value, used: &[u16]) -> std::result::Result<Vec<u64>, (usize, String)> {
        if let Some(list) = spec["ports"].as_array_mut() {
            list.iter_mut()
                .filter(|port| port["protocol"].is_null())
                .for_each(|port| port["protocol"] = "TCP".into());
        }
        let mut object = json!({"spec": spec});
        let (services, addresses) = (services(&[], used), Allocated::default());
        let mut used = allocations(&services, &addresses, &NODE_PORTS);
        ports(&mut object, &mut used)?;
        let list = object["spec"]["ports"].as_array().unwrap();
        Ok(list.iter().map(|port| port["nodePort"].as_u64().unwrap_or(0)).collect())
    }

    #[test]
    fn requested_node_ports_are_checked_also_where_none_are_allocated() {
        for more in [
            json!({"type": "NodePort"}),
            json!({"type": "LoadBalancer"}),
            json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false}),
        ] {
            let with = |number: i64, used: &[u16]| {
                let mut spec = more.clone();
                spec["ports"] = json!([{"port": 79, "nodePort": 30001}, {"port": 80, "nodePort": number}]);
                allocated(spec, used)
            };
            for number in [22, 53, 6443, 10250, 29999, 32768, 65536 + 30080, -1, -30080] {
                let (index, message) = with(number, &[]).unwrap_err();
                assert!(
                    index == 1 && message.contains("not in the valid range"),
                    "{more} {number}: {message}"
                );
            }
            assert!(with(30080, &[30080]).unwrap_err().1.contains("already allocated"), "{more}");
            assert_eq!(with(30080, &[30081]).unwrap(), [30001, 30080]);
        }
        let none =
            json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 80}]});
        assert_eq!(allocated(none, &[]).unwrap(), [0]);
    }

    #[test]
    fn an_update_keeps_the_node_ports_of_the_same_names() {
        let old = json!({"spec": {"type": "NodePort", "ports": [
            {"name": "a", "port": 80, "nodePort": 30001}, {"name": "b", "port": 81, "nodePort": 30002}]}});
        let kept = |kind: &str, ports: Value| {
            let mut new = json!({"spec": {"type": kind, "ports": ports}});
            keep_node_ports(&mut new, &old);
            elements(&new).map(|port| port["nodePort"].as_i64().unwrap_or(0)).collect::<Vec<_>>()
        };
        let other_numbers = json!([{"name": "b", "port": 91}, {"name": "a", "port": 90}]);
        assert_eq!(kept("NodePort", other_numbers.clone()), [30002, 30001]);
        assert_eq!(kept("LoadBalancer", other_numbers.clone()), [30002, 30001]);
        assert_eq!(kept("ClusterIP", other_numbers), [0, 0]);
        assert_eq!(kept("NodePort", json!([{"name": "c", "port": 80}])), [0], "another name");
        let moved = json!([{"name": "a", "port": 80}, {"name": "c", "port": 82, "nodePort": 30001}]);
        assert_eq!(kept("NodePort", moved), [0, 30001], "another port has it now");
    }

    #[test]
    fn protocols_of_one_port_share_a_node_port() {
        let dns = |udp: Value| {
            json!({"type": "NodePort", "ports": [
                {"port": 53, "protocol": "TCP"}, {"port": 53, "protocol": "UDP", "nodePort": udp}, {"port": 80}]})
        };
        let any = allocated(dns(json!(null)), &[]).unwrap();
        assert!(any[0] == any[1] && any[0] != any[2], "{any:?}");
        let fixed = allocated(dns(json!(30053)), &[]).unwrap();
        assert!(fixed[..2] == [30053, 30053] && fixed[2] != 30053, "{fixed:?}");
    }

    #[test]
    fn a_service_gets_an_address_of_each_family_and_keeps_what_it_has() {
        let (services, addresses) = (services(&[], &[]), Allocated::default());
        let old = json!({"spec": {"type": "ClusterIP", "clusterIPs": ["10.9.9.9"]}});
        let used = UsedAllocations {
            old: OldAllocation::of(&old),
            ..allocations(&services, &addresses, &NODE_PORTS)
        };
        let ranges = [range("10.43.0.0/24"), range("fd43::/112")];
        let mut object = json!({"spec": {"clusterIPs": ["10.9.9.9"], "ipFamilies": ["IPv4", "IPv6"]}});
        cluster_ips(&mut object, &ranges, &used).unwrap();
        let second: IpAddr = object["spec"]["clusterIPs"][1].as_str().unwrap().parse().unwrap();
        assert_eq!(
            (&object["spec"]["clusterIPs"][0], &object["spec"]["clusterIP"]),
            (&json!("10.9.9.9"), &json!("10.9.9.9"))
        );
        assert!(ranges[1].contains(second));
        let mut changed = json!({"spec": {"clusterIPs": ["x"], "ipFamilies": ["IPv4"]}});
        cluster_ips(&mut changed, &ranges, &used).unwrap();
        assert_eq!(changed["spec"]["clusterIPs"], json!(["x"]), "validation rejects it");
        let mut headless =
            json!({"spec": {"clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": ["IPv4", "IPv6"]}});
        cluster_ips(&mut headless, &ranges, &used).unwrap();
        assert_eq!(headless["spec"]["clusterIPs"], json!(["None"]));
    }

    #[test]
    fn a_balancer_with_local_traffic_has_a_port_for_health_checks() {
        let with = |spec: Value, used: &[u16]| {
            let (services, addresses) = (services(&[], used), Allocated::default());
            let chosen = HashSet::from([30001]);
            let used = UsedAllocations { chosen, ..allocations(&services, &addresses, &NODE_PORTS) };
            let mut object = json!({"spec": spec});
            health_port(&mut object, &used).map(|()| object["spec"]["healthCheckNodePort"].as_u64())
        };
        let local = |port: Value| json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port});
        let any = with(local(json!(0)), &[]).unwrap().unwrap();
        assert!(NODE_PORTS.contains(&u16::try_from(any).unwrap()) && any != 30001);
        assert_eq!(with(local(json!(30500)), &[]).unwrap(), Some(30500));
        assert!(with(local(json!(30500)), &[30500]).unwrap_err().contains("already allocated"));
        assert!(
            with(local(json!(30001)), &[]).unwrap_err().contains("already allocated"),
            "its own node port"
        );
        assert!(with(local(json!(22)), &[]).unwrap_err().contains("not in the valid range"));
        let cluster = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"});
        assert_eq!(with(cluster, &[]).unwrap(), None);
    }
}
