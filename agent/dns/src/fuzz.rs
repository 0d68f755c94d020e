//! Functions of the fuzz targets in `integration/fuzz`, and a test that replays their corpora with a stable compiler.
//! Each function accepts any bytes and fails by a panic, or by exceeding the fuzzer's limits on time and memory.

use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, RwLock};

use coracle_services::{AddressType, Endpoint, EndpointSlice, SlicePort, Tables};
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::reply::{Reply, Sources, Transport, reply};
use crate::zone::Zone;
use crate::{exchange, forward::Upstream, metrics::Metrics, servers};

/// The namespace of the services.
const NAMESPACE: &str = "default";
/// Endpoints of the service `many`. An answer with all of them is larger than a message.
const MANY: u16 = 2100;

/// Fuzz target: messages of clients and of other servers, and the resolver's configuration. Each message of a client is
/// answered for each transport: with all services, and with empty tables, as before the first lists.
pub fn dns(data: &[u8]) {
    static SERVER: LazyLock<Option<([Zone; 2], Arc<Upstream>)>> = LazyLock::new(|| {
        let zones = [zone(tables())?, zone(Tables::default())?];
        let metrics = Arc::new(Metrics::default());
        Some((zones, Arc::new(Upstream::new(PathBuf::new(), Vec::new(), &[], metrics))))
    });
    let Some((zones, upstream)) = &*SERVER else { return };
    for zone in zones {
        for transport in [Transport::Udp, Transport::Tcp, Transport::TcpLarge] {
            let response = match reply(data, transport, Sources { zone, upstream }) {
                Reply::Nothing => None,
                Reply::Now(response) => Some(response),
                Reply::Forward(pending) => Some(pending.without_permit(upstream)),
            };
            let Some(response) = response else { continue };
            if let Some(bytes) = response.encode() {
                let most = response.limit;
                assert!(bytes.len() <= usize::from(most), "a reply of {} bytes for {most}", bytes.len());
            }
        }
    }
    exchange::fuzz(data);
    servers::fuzz(data);
}

fn zone(tables: Tables) -> Option<Zone> {
    let server = IpAddr::from([10, 43, 0, 10]);
    Zone::new("cluster.local", Arc::new(RwLock::new(tables)), vec![server])
}

/// Services of all kinds with their endpoints.
fn tables() -> Tables {
    let mut tables = Tables::default();
    let alias = |target: &str| ServiceSpec {
        type_: Some("ExternalName".to_owned()),
        external_name: Some(target.to_owned()),
        ..ServiceSpec::default()
    };
    let headless = || ServiceSpec { cluster_ip: Some("None".to_owned()), ..ServiceSpec::default() };
    let port =
        ServicePort { name: Some("http".to_owned()), port: 80, protocol: None, ..ServicePort::default() };
    let web = ServiceSpec {
        cluster_ips: Some(vec!["10.43.0.1".to_owned(), "fd43::1".to_owned()]),
        ports: Some(vec![port]),
        ..ServiceSpec::default()
    };
    tables.replace_services([
        service("web", web),
        service("db", headless()),
        service("many", headless()),
        service("empty", headless()),
        service("away", alias("foo.example.com")),
        service("near", alias("web.default.svc.cluster.local")),
        service("loop", alias("loop.default.svc.cluster.local")),
    ]);
    let many = (0..MANY).map(|number| {
        let [high, low] = number.to_be_bytes();
        endpoint(IpAddr::from([10, 44, high, low]), None)
    });
    let many: Vec<Endpoint> = many.collect();
    let mut slices: Vec<_> =
        many.chunks(700).enumerate().map(|(number, part)| slice("many", number, part.to_vec())).collect();
    let named = endpoint(IpAddr::from([10, 42, 0, 7]), Some("db-0"));
    let v6 = endpoint(IpAddr::V6(Ipv6Addr::new(0xfd42, 0, 0, 0, 0, 0, 0, 7)), Some("db-0"));
    slices.push(slice("db", 0, vec![named, v6, endpoint(IpAddr::from([10, 42, 0, 8]), None)]));
    tables.replace_slices(slices);
    tables.replace_namespaces([NAMESPACE.to_owned()].into());
    tables
}

fn service(name: &str, spec: ServiceSpec) -> Arc<Service> {
    let metadata = metadata(name.to_owned());
    Arc::new(Service { metadata, spec: Some(spec), ..Service::default() })
}

fn slice(service: &str, number: usize, endpoints: Vec<Endpoint>) -> Arc<EndpointSlice> {
    let port = SlicePort { name: Some("sql".into()), port: Some(5432), ..SlicePort::default() };
    let label = ("kubernetes.io/service-name".to_owned(), service.to_owned());
    let mut slice = EndpointSlice::default();
    slice.metadata = ObjectMeta { labels: Some([label].into()), ..metadata(format!("{service}-{number}")) };
    slice.address_type = AddressType::IPv4;
    slice.endpoints = endpoints;
    slice.ports = vec![port];
    slice.slim()
}

fn metadata(name: String) -> ObjectMeta {
    ObjectMeta { namespace: Some(NAMESPACE.to_owned()), name: Some(name), ..ObjectMeta::default() }
}

fn endpoint(address: IpAddr, hostname: Option<&str>) -> Endpoint {
    Endpoint { address: Some(address), hostname: hostname.map(Box::from), ..Endpoint::default() }
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::ResponseCode;
    use hickory_proto::rr::{Name, RecordType};

    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("dns", dns);
    }

    #[test]
    fn the_fuzzed_zone_has_answers_of_all_kinds() {
        let zone = zone(tables()).unwrap();
        let count = |name: &str, kind| {
            let answer = zone.answer_up_to(&Name::from_ascii(name).unwrap(), kind, usize::MAX).unwrap();
            (answer.code, answer.records.len())
        };
        for (name, kind, records) in [
            ("cluster.local.", RecordType::SOA, 1),
            ("dns-version.cluster.local.", RecordType::TXT, 1),
            ("ns.dns.cluster.local.", RecordType::A, 1),
            ("web.default.svc.cluster.local.", RecordType::ANY, 2),
            ("_http._tcp.web.default.svc.cluster.local.", RecordType::SRV, 1),
            ("db-0.db.default.svc.cluster.local.", RecordType::AAAA, 1),
            ("db.default.svc.cluster.local.", RecordType::SRV, 2),
            ("many.default.svc.cluster.local.", RecordType::A, 1000),
            ("near.default.svc.cluster.local.", RecordType::A, 1),
            ("10-42-0-1.default.pod.cluster.local.", RecordType::A, 1),
            ("7.0.42.10.in-addr.arpa.", RecordType::PTR, 1),
        ] {
            assert_eq!(count(name, kind), (ResponseCode::NoError, records), "{name} {kind}");
        }
        for absent in ["empty.default.svc.cluster.local.", "web.other.svc.cluster.local."] {
            assert_eq!(count(absent, RecordType::A), (ResponseCode::NXDomain, 0), "{absent}");
        }
    }
}
