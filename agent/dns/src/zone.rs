//! The cluster's DNS zone: answers from the tables of services and slices. It does no I/O.

mod endpoints;
mod names;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use coracle_services::{Tables, cluster_ips, is_headless};
use coracle_values::object::Key;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use k8s_openapi::api::core::v1::Service;

use endpoints::{EXAMINED_MAX, Endpoints, Host, Search};
use names::{EndpointLabel, Owner, endpoint_name, parse};

/// Time to live of all records, in seconds.
const TTL: u32 = 5;
/// Version of the specification of DNS-based service discovery.
const VERSION: &str = "1.1.0";
/// Maximum records of an answer, so that it fits into a message over TCP (64 KiB).
const RECORDS_MAX: usize = 1000;

/// The DNS zone of a cluster.
#[derive(Clone)]
pub struct Zone {
    domain: Name,
    tables: Arc<RwLock<Tables>>,
    /// Addresses of the DNS server itself.
    addresses: Vec<IpAddr>,
}

/// An answer from the tables.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) code: ResponseCode,
    pub(crate) records: Vec<Record>,
    pub(crate) additionals: Vec<Record>,
    /// The target of the alias in `records`, inside or outside the zone. The addresses of this name must be added to
    /// the answer.
    pub(crate) alias: Option<Name>,
}

// === impl Zone ===

impl Zone {
    /// The names below `domain`. `None` if the domain is not a domain name.
    #[must_use]
    pub fn new(domain: &str, tables: Arc<RwLock<Tables>>, addresses: Vec<IpAddr>) -> Option<Self> {
        let mut domain = Name::from_ascii(domain).ok()?.to_lowercase();
        domain.set_fqdn(true);
        Some(Self { domain, tables, addresses })
    }

    /// The answer for a name and a record type. `None` if the name does not belong to the cluster. The answer is built
    /// up to about `most` records. The caller chooses a number for which the reply has no room.
    pub(crate) fn answer_up_to(&self, name: &Name, kind: RecordType, most: usize) -> Option<Answer> {
        let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
        let lower = name.to_lowercase();
        if self.domain.zone_of(&lower) {
            let lookup = Lookup { zone: self, tables: &tables, name, kind, most: most.min(RECORDS_MAX) };
            let owner = parse(&lower, self.domain.num_labels());
            return Some(if tables.is_complete() { lookup.answer(&owner) } else { lookup.known(&owner) });
        }
        self.reverse(&tables, name, kind)
    }

    /// The zone's SOA record, for negative answers.
    pub(crate) fn soa(&self) -> Record {
        let name =
            |prefix: &str| Name::parse(prefix, Some(&self.domain)).unwrap_or_else(|_| self.domain.clone());
        // The serial is constant: the zone has no secondary servers.
        let [refresh, retry, expire] = [7200, 1800, 86_400];
        let soa = SOA::new(name("ns.dns"), name("hostmaster"), 1, refresh, retry, expire, TTL);
        Record::from_rdata(self.domain.clone(), TTL, RData::SOA(soa))
    }

    /// PTR records of an address. `None` for an unknown address, whose query is forwarded.
    fn reverse(&self, tables: &Tables, name: &Name, kind: RecordType) -> Option<Answer> {
        let network = name.parse_arpa_name().ok()?;
        let host_prefix = if network.addr().is_ipv4() { 32 } else { 128 };
        let address = Some(network.addr()).filter(|_| network.prefix_len() == host_prefix)?;
        let services = tables.with_cluster_ip(address).take(RECORDS_MAX);
        let mut targets: Vec<Name> = services.filter_map(|key| self.service_name(key)).collect();
        let mut search = Search::default();
        for key in tables.with_endpoint(address) {
            let is_included =
                search.includes(&key.namespace) && tables.get(&key.namespace, &key.name).is_some();
            if !is_included {
                continue;
            }
            // As in CoreDNS, only endpoints that take traffic have a name.
            let endpoints = Endpoints::new(tables, key);
            search.examined(endpoints.count());
            let named = endpoints.hosts().filter(|host| host.address == address).filter_map(|host| {
                self.service_name(key)?.prepend_label(endpoint_name(host.endpoint).as_bytes()).ok()
            });
            targets.extend(named);
        }
        targets.sort();
        targets.dedup();
        targets.truncate(RECORDS_MAX);
        if targets.is_empty() {
            // The address may belong to a service or a pod that is not listed yet.
            return Some(unknown()).filter(|_| !tables.is_complete() && is_private(address));
        }
        let wanted = matches!(kind, RecordType::PTR | RecordType::ANY);
        let targets = targets.into_iter().filter(|_| wanted);
        let records = targets.map(|target| Record::from_rdata(name.clone(), TTL, RData::PTR(PTR(target))));
        Some(Answer { records: records.collect(), ..Answer::default() })
    }

    /// `name.namespace.svc.domain`.
    fn service_name(&self, key: &Key) -> Option<Name> {
        let labels = [key.name.as_bytes(), key.namespace.as_bytes(), b"svc"];
        Name::from_labels(labels).ok()?.append_domain(&self.domain).ok()
    }
}

/// The look-up for one question.
struct Lookup<'a> {
    zone: &'a Zone,
    tables: &'a Tables,
    /// The name in the spelling of the client. Answers repeat this spelling.
    name: &'a Name,
    kind: RecordType,
    /// Maximum records of the answer.
    most: usize,
}

/// The port in the name of an SRV record. An empty name matches all names, and an empty protocol matches all protocols.
#[derive(Clone, Copy)]
struct NamedPort<'a> {
    name: &'a str,
    protocol: &'a str,
}

impl NamedPort<'_> {
    /// Whether a port has this name and this protocol. As in CoreDNS, `_._tcp` matches all ports of the protocol, and
    /// `_http._` matches this port with any protocol.
    fn matches(&self, name: &str, protocol: &str) -> bool {
        (self.name.is_empty() || self.name == name)
            && (self.protocol.is_empty() || self.protocol.eq_ignore_ascii_case(protocol))
    }
}

/// A target of SRV records, with one address.
struct SrvTarget {
    port: u16,
    name: Name,
    address: IpAddr,
}

impl Lookup<'_> {
    fn answer(&self, owner: &Owner<'_>) -> Answer {
        match owner {
            Owner::Apex => self.apex(),
            Owner::Version if self.kind == RecordType::TXT => {
                self.answer_with([RData::TXT(TXT::new(vec![VERSION.to_owned()]))])
            }
            Owner::Version | Owner::Branch => Answer::default(),
            Owner::Server => self.addresses(self.zone.addresses.iter().copied()),
            Owner::Namespace(namespace) if self.tables.has_namespace(namespace) => Answer::default(),
            // As in CoreDNS, any address has a name in each namespace, unless the namespace is known not to exist.
            Owner::Pod { address, namespace } if !self.tables.lacks_namespace(namespace) => {
                self.addresses([*address])
            }
            Owner::Service { name, namespace } => {
                self.of_service(namespace, name, |lookup, service, all| lookup.service(service, all))
            }
            Owner::Port { port, protocol, name, namespace } => {
                self.of_service(namespace, name, |lookup, service, all| {
                    lookup.ports(service, all, Some(NamedPort { name: port, protocol }))
                })
            }
            Owner::Endpoint { host, name, namespace } => {
                self.of_service(namespace, name, |lookup, _, all| lookup.endpoint(all, host))
            }
            Owner::Namespace(_) | Owner::Pod { .. } | Owner::Unknown => absent(),
        }
    }

    /// The answer while the tables are incomplete. The tables may already contain services and endpoints, for example
    /// from an earlier run. A name that the tables do not contain may exist, so no answer says that a name does not
    /// exist.
    fn known(&self, owner: &Owner<'_>) -> Answer {
        match owner {
            Owner::Service { name, namespace } => {
                let endpoints = Endpoints::new(self.tables, &Key::new(namespace, name));
                match self.tables.named(namespace, name) {
                    Some(service) if !is_headless(service) || endpoints.hosts().next().is_some() => {
                        self.service(service, &endpoints)
                    }
                    _ => unknown(),
                }
            }
            Owner::Port { .. } | Owner::Endpoint { .. } => {
                let answer = self.answer(owner);
                if answer.code == ResponseCode::NXDomain { unknown() } else { answer }
            }
            _ => unknown(),
        }
    }

    fn apex(&self) -> Answer {
        match self.kind {
            RecordType::SOA => Answer { records: vec![self.zone.soa()], ..Answer::default() },
            RecordType::NS => match Name::parse("ns.dns", Some(&self.zone.domain)) {
                Ok(server) => {
                    let addresses = self.zone.addresses.iter();
                    let record =
                        |address: &IpAddr| Record::from_rdata(server.clone(), TTL, data_of(*address));
                    let additionals = addresses.map(record).collect();
                    Answer { additionals, ..self.answer_with([RData::NS(NS(server))]) }
                }
                Err(_) => Answer::default(),
            },
            _ => Answer::default(),
        }
    }

    fn of_service(
        &self,
        namespace: &str,
        name: &str,
        answer: impl FnOnce(&Self, &Service, &Endpoints<'_>) -> Answer,
    ) -> Answer {
        match self.tables.named(namespace, name) {
            Some(service) => answer(self, service, &Endpoints::new(self.tables, &Key::new(namespace, name))),
            None => absent(),
        }
    }

    fn service(&self, service: &Service, endpoints: &Endpoints<'_>) -> Answer {
        let spec = service.spec.as_ref();
        if spec.and_then(|spec| spec.type_.as_deref()) == Some("ExternalName") {
            return self.alias(spec.and_then(|spec| spec.external_name.as_deref()).unwrap_or_default());
        }
        // Without ready endpoints the name does not exist (section 2.4.1 of the specification).
        if is_headless(service) && endpoints.hosts().next().is_none() {
            return not_found(endpoints);
        }
        if self.kind == RecordType::SRV {
            return self.ports(service, endpoints, None);
        }
        if is_headless(service) {
            return self.addresses(endpoints.hosts_from_random_slice().map(|host| host.address));
        }
        self.addresses(cluster_ips(service))
    }

    fn alias(&self, target: &str) -> Answer {
        // As in CoreDNS, the name does not exist if the external name is an IP address.
        let target = Some(target).filter(|target| target.parse::<IpAddr>().is_err());
        let Some(Ok(mut target)) = target.map(Name::from_ascii) else { return absent() };
        target.set_fqdn(true);
        let mut answer = self.answer_with([RData::CNAME(CNAME(target.clone()))]);
        if matches!(self.kind, RecordType::A | RecordType::AAAA) {
            answer.alias = Some(target);
        }
        answer
    }

    fn endpoint(&self, endpoints: &Endpoints<'_>, host: &str) -> Answer {
        let label = EndpointLabel::parse(host);
        let named = endpoints.hosts().filter(|of: &Host<'_>| label.names(of.endpoint));
        let all: Vec<IpAddr> = named.map(|host| host.address).collect();
        if all.is_empty() { not_found(endpoints) } else { self.addresses(all) }
    }

    /// The SRV records of a service's ports, or of one port by name and protocol.
    fn ports(&self, service: &Service, endpoints: &Endpoints<'_>, only: Option<NamedPort<'_>>) -> Answer {
        let fits = |name: &str, protocol: &str| only.is_none_or(|port| port.matches(name, protocol));
        let Some(base) = self.zone.service_name(&key_of(service)) else { return absent() };
        let mut targets: Vec<SrvTarget> = Vec::new();
        // Several targets may become one record: an endpoint can have two addresses, or can be in two slices.
        let most = self.most.saturating_mul(4).min(RECORDS_MAX);
        if is_headless(service) {
            // A tenant controls the numbers of ports and endpoints, so the list of all their combinations is never
            // built.
            let mut left = EXAMINED_MAX;
            for slice in endpoints.slices() {
                let Some(rest) = left.checked_sub(slice.ports.len() + slice.endpoints.len()) else { break };
                left = rest;
                let ports = slice.ports.iter().filter(|port| fits(port.name(), port.protocol()));
                let ports: Vec<u16> = ports.filter_map(|port| port.port).take(most).collect();
                for host in endpoints.of_slice(slice).filter(|_| !ports.is_empty()) {
                    if targets.len() >= most {
                        break;
                    }
                    if let Ok(target) = base.prepend_label(endpoint_name(host.endpoint).as_bytes()) {
                        let address = host.address;
                        let of_port = |port: &u16| SrvTarget { port: *port, name: target.clone(), address };
                        targets.extend(ports.iter().map(of_port));
                    }
                }
            }
        } else {
            let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
            for port in ports.filter(|port| {
                fits(port.name.as_deref().unwrap_or_default(), port.protocol.as_deref().unwrap_or("TCP"))
            }) {
                let Ok(number) = u16::try_from(port.port) else { continue };
                if targets.len() >= most {
                    break;
                }
                let of_address = |address| SrvTarget { port: number, name: base.clone(), address };
                targets.extend(cluster_ips(service).map(of_address));
            }
        }
        targets.truncate(most);
        match targets.is_empty() && only.is_some() {
            true if is_headless(service) => not_found(endpoints),
            true => absent(),
            false if self.kind != RecordType::SRV => Answer::default(),
            false => self.srv(targets),
        }
    }

    fn srv(&self, targets: Vec<SrvTarget>) -> Answer {
        // The weights are equal and add up to 100, as in CoreDNS.
        let distinct: std::collections::BTreeSet<_> =
            targets.iter().map(|target| (target.port, &target.name)).collect();
        let weight = u16::try_from(100 / distinct.len().max(1)).unwrap_or(1).max(1);
        let mut answer = Answer::default();
        let (mut records, mut additionals) = (HashSet::new(), HashSet::new());
        for SrvTarget { port, name: target, address } in targets {
            let is_new = records.insert((port, target.clone()));
            let is_new_address = additionals.insert((target.clone(), address));
            let record = RData::SRV(SRV::new(0, weight, port, target.clone()));
            let record = Record::from_rdata(self.name.clone(), TTL, record);
            let additional = Record::from_rdata(target, TTL, data_of(address));
            if is_new {
                answer.records.push(record);
            }
            if is_new_address {
                answer.additionals.push(additional);
            }
        }
        answer
    }

    fn addresses(&self, all: impl IntoIterator<Item = IpAddr>) -> Answer {
        let fits = |address: &IpAddr| match self.kind {
            RecordType::A => address.is_ipv4(),
            RecordType::AAAA => address.is_ipv6(),
            RecordType::ANY => true,
            _ => false,
        };
        let mut all = distinct(all.into_iter().filter(fits), self.most);
        // Clients often use the first address, so each answer begins with a random one.
        if !all.is_empty() {
            let first = rand::random_range(0..all.len());
            all.rotate_left(first);
        }
        self.answer_with(all.into_iter().map(data_of))
    }

    /// An answer with one record for each item of `data`.
    fn answer_with(&self, data: impl IntoIterator<Item = RData>) -> Answer {
        let records = data.into_iter().take(self.most);
        let records = records.map(|data| Record::from_rdata(self.name.clone(), TTL, data)).collect();
        Answer { records, ..Answer::default() }
    }
}

/// `SERVFAIL`, for example while the tables are incomplete, as in CoreDNS. Clients would cache a negative answer.
fn unknown() -> Answer {
    Answer { code: ResponseCode::ServFail, ..Answer::default() }
}

/// Whether the address may belong to a service or a pod, because it is not in a public range.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(ip) => ip.is_private() || matches!(ip.octets(), [100, 64..=127, ..]),
        IpAddr::V6(ip) => ip.is_unique_local(),
    }
}

/// The answer for a name that is not among the endpoints of a service. With more endpoints than a query examines, the
/// name may exist, so the answer is `SERVFAIL`.
fn not_found(endpoints: &Endpoints<'_>) -> Answer {
    if endpoints.is_partial() { unknown() } else { absent() }
}

fn absent() -> Answer {
    Answer { code: ResponseCode::NXDomain, ..Answer::default() }
}

fn data_of(address: IpAddr) -> RData {
    match address {
        IpAddr::V4(ip) => RData::A(A(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
    }
}

fn key_of(service: &Service) -> Key {
    Key::of(&service.metadata)
}

/// The distinct addresses in order. The search ends when it has found `most` of them.
fn distinct(all: impl Iterator<Item = IpAddr>, most: usize) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    for address in all {
        found.push(address);
        if found.len() >= 2 * most {
            found.sort_unstable();
            found.dedup();
            if found.len() >= most {
                return found;
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests;
