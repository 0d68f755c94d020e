//! Answers from the services of the cluster.

use coracle_services::EndpointSlice;
use serde_json::{Value, json};

use super::*;

impl Zone {
    /// The answer by TCP.
    fn answer(&self, name: &Name, kind: RecordType) -> Option<Answer> {
        self.answer_up_to(name, kind, RECORDS_MAX)
    }
}

fn tables() -> Tables {
    let mut tables = Tables::default();
    let mut service = |name: &str, spec: Value| {
        let value = json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec});
        tables.put_service(Arc::new(serde_json::from_value(value).unwrap()));
    };
    service(
        "web",
        json!({"clusterIP": "10.43.0.5", "clusterIPs": ["10.43.0.5", "fd43::5"],
        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}),
    );
    service("db", json!({"clusterIP": "None", "selector": {"a": "b"}}));
    service("away", json!({"type": "ExternalName", "externalName": "foo.example.com"}));
    service("address", json!({"type": "ExternalName", "externalName": "192.0.2.1"}));
    service("empty", json!({"clusterIP": "None"}));
    let slice = json!({"metadata": {"namespace": "ns", "name": "db-1", "labels": {"kubernetes.io/service-name": "db"}},
        "addressType": "IPv4", "ports": [{"name": "sql", "port": 5432}], "endpoints": [
            {"addresses": ["10.42.0.7"], "hostname": "db-0"}, {"addresses": ["10.42.0.8"]},
            {"addresses": ["10.42.0.9"], "conditions": {"ready": false}}]});
    let all: Vec<_> = tables.services().cloned().collect();
    tables.replace_services(all);
    tables.replace_slices([serde_json::from_value::<EndpointSlice>(slice).unwrap().slim()]);
    tables
}

#[test]
fn names_of_the_cluster_fail_before_the_first_lists() {
    let ask = |tables: Tables, name: &str| {
        let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
        zone.answer(&Name::from_ascii(name).unwrap(), RecordType::A).map(|answer| answer.code)
    };
    let only_services = || {
        let mut tables = Tables::default();
        tables.replace_services([]);
        tables
    };
    for name in ["web.ns.svc.cluster.local.", "5.0.43.10.in-addr.arpa."] {
        assert_eq!(ask(Tables::default(), name), Some(ResponseCode::ServFail), "{name}");
        assert_eq!(ask(only_services(), name), Some(ResponseCode::ServFail), "{name}");
    }
    for name in ["example.com.", "8.8.8.8.in-addr.arpa."] {
        assert_eq!(ask(Tables::default(), name), None, "{name}");
    }
}

#[test]
fn known_services_have_their_cluster_ips_before_the_first_lists() {
    let mut stored = Tables::default();
    stored.put_stored(tables().services().cloned().collect::<Vec<_>>());
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(stored)), Vec::new()).unwrap();
    let ask = |name: &str, kind| {
        let name = format!("{name}.ns.svc.cluster.local.");
        let answer = zone.answer(&Name::from_ascii(name).unwrap(), kind).unwrap();
        (answer.code, answer.records.len())
    };
    assert_eq!(ask("web", RecordType::A), (ResponseCode::NoError, 1));
    assert_eq!(ask("web", RecordType::SRV), (ResponseCode::NoError, 1));
    assert_eq!(ask("away", RecordType::A), (ResponseCode::NoError, 1));
    for unknown in ["db", "db-0.db", "other"] {
        assert_eq!(ask(unknown, RecordType::A), (ResponseCode::ServFail, 0), "{unknown}");
    }
}

#[test]
fn stored_names_have_answers_before_the_first_lists() {
    let mut stored = Tables::default();
    stored.put_stored_names(tables().services().cloned().collect::<Vec<_>>());
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(stored)), Vec::new()).unwrap();
    let ask = |name: &str, kind| {
        let name = format!("{name}.ns.svc.cluster.local.");
        let answer = zone.answer(&Name::from_ascii(name).unwrap(), kind).unwrap();
        (answer.code, answer.records.len())
    };
    for (name, kind, count) in [
        ("web", RecordType::A, 1),
        ("web", RecordType::AAAA, 1),
        ("web", RecordType::SRV, 1),
        ("_http._tcp.web", RecordType::SRV, 1),
        ("away", RecordType::A, 1),
    ] {
        assert_eq!(ask(name, kind), (ResponseCode::NoError, count), "{name} {kind}");
    }
    // The endpoints of headless services are unknown.
    for unknown in ["db", "db-0.db", "_other._tcp.web", "other"] {
        assert_eq!(ask(unknown, RecordType::A), (ResponseCode::ServFail, 0), "{unknown}");
    }
}

#[test]
fn known_endpoints_have_addresses_before_the_first_lists() {
    let (all, mut stored) = (tables(), Tables::default());
    stored.put_stored(all.services().cloned().collect::<Vec<_>>());
    stored.put_stored_slices(all.all_slices().cloned().collect::<Vec<_>>());
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(stored)), Vec::new()).unwrap();
    let ask = |name: &str, kind| {
        let name = format!("{name}.ns.svc.cluster.local.");
        let answer = zone.answer(&Name::from_ascii(name).unwrap(), kind).unwrap();
        (answer.code, answer.records.len())
    };
    for (name, kind, count) in [
        ("db", RecordType::A, 2),
        ("db", RecordType::AAAA, 0),
        ("db-0.db", RecordType::A, 1),
        ("_sql._tcp.db", RecordType::SRV, 2),
        ("_http._tcp.web", RecordType::SRV, 1),
    ] {
        assert_eq!(ask(name, kind), (ResponseCode::NoError, count), "{name} {kind}");
    }
    for unknown in ["db-9.db", "_other._tcp.db", "empty", "other"] {
        assert_eq!(ask(unknown, RecordType::A), (ResponseCode::ServFail, 0), "{unknown}");
    }
}

fn ask(name: &str, kind: RecordType) -> Option<Answer> {
    let zone =
        Zone::new("cluster.local", Arc::new(RwLock::new(tables())), vec!["10.43.0.10".parse().unwrap()]);
    zone.unwrap().answer(&Name::from_ascii(name).unwrap(), kind)
}

/// The data of the answer as text, or the response code if there is none.
fn shown(name: &str, kind: RecordType) -> String {
    let answer = ask(&format!("{name}.cluster.local."), kind).unwrap();
    let mut all: Vec<String> = answer.records.iter().map(|record| record.data.to_string()).collect();
    all.sort();
    if all.is_empty() { answer.code.to_string() } else { all.join(" ") }
}

const NONE: &str = "No Error";
const ABSENT: &str = "Non-Existent Domain";

#[test]
fn services_have_addresses_of_each_family() {
    assert_eq!(shown("web.ns.svc", RecordType::A), "10.43.0.5");
    assert_eq!(shown("WEB.ns.SVC", RecordType::AAAA), "fd43::5");
    assert_eq!(shown("web.ns.svc", RecordType::MX), NONE);
    assert_eq!(shown("none.ns.svc", RecordType::A), ABSENT);
    assert_eq!(shown("ns.svc", RecordType::A), NONE);
    assert_eq!(shown("other.svc", RecordType::A), ABSENT);
    assert_eq!(shown("ns.dns", RecordType::A), "10.43.0.10");
    assert_eq!(shown("dns-version", RecordType::TXT), "1.1.0");
}

#[test]
fn the_name_server_of_the_domain_has_its_address_in_the_answer() {
    let answer = ask("cluster.local.", RecordType::NS).unwrap();
    assert_eq!(answer.records[0].data.to_string(), "ns.dns.cluster.local.");
    let [address] = &answer.additionals[..] else { panic!("{:?}", answer.additionals) };
    assert_eq!(
        (address.name.to_string().as_str(), address.data.to_string().as_str()),
        ("ns.dns.cluster.local.", "10.43.0.10")
    );
}

#[test]
fn headless_services_have_their_ready_endpoints() {
    assert_eq!(shown("db.ns.svc", RecordType::A), "10.42.0.7 10.42.0.8");
    assert_eq!(shown("db-0.db.ns.svc", RecordType::A), "10.42.0.7");
    assert_eq!(shown("10-42-0-8.db.ns.svc", RecordType::A), "10.42.0.8");
    assert_eq!(shown("10-42-0-9.db.ns.svc", RecordType::A), ABSENT);
    assert_eq!(shown("10-42-0-7.web.ns.svc", RecordType::A), ABSENT);
    assert_eq!(shown("empty.ns.svc", RecordType::A), ABSENT);
    assert_eq!(shown("empty.ns.svc", RecordType::SRV), ABSENT);
    assert_eq!(shown("db.ns.svc", RecordType::AAAA), NONE);
}

#[test]
fn ports_have_service_records() {
    let web = "0 100 80 web.ns.svc.cluster.local.";
    assert_eq!(shown("_http._tcp.web.ns.svc", RecordType::SRV), web);
    assert_eq!(shown("web.ns.svc", RecordType::SRV), web);
    assert_eq!(shown("_http._udp.web.ns.svc", RecordType::SRV), ABSENT);
    assert_eq!(shown("_http._tcp.web.ns.svc", RecordType::A), NONE);
    for all in ["_._tcp.web.ns.svc", "_http._.web.ns.svc", "_._.web.ns.svc", "http.tcp.web.ns.svc"] {
        assert_eq!(shown(all, RecordType::SRV), web, "{all}");
    }
    assert_eq!(shown("_._udp.web.ns.svc", RecordType::SRV), ABSENT);
    assert_eq!(shown("a.b.web.ns.svc", RecordType::A), ABSENT);
    let db = "0 50 5432 10-42-0-8.db.ns.svc.cluster.local. 0 50 5432 db-0.db.ns.svc.cluster.local.";
    assert_eq!(shown("_sql._tcp.db.ns.svc", RecordType::SRV), db);
    assert_eq!(ask("_sql._tcp.db.ns.svc.cluster.local.", RecordType::SRV).unwrap().additionals.len(), 2);
}

#[test]
fn external_names_are_aliases() {
    assert_eq!(shown("away.ns.svc", RecordType::CNAME), "foo.example.com.");
    let answer = ask("away.ns.svc.cluster.local.", RecordType::A).unwrap();
    assert_eq!(answer.alias.unwrap().to_ascii(), "foo.example.com.");
    assert_eq!(shown("address.ns.svc", RecordType::A), ABSENT);
}

/// As in CoreDNS, endpoints of a service with a cluster IP have names.
#[test]
fn endpoints_of_services_with_addresses_have_names() {
    let mut tables = tables();
    let slice = json!({"metadata": {"namespace": "ns", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.42.0.5"], "hostname": "web-0"}]});
    tables.replace_slices([serde_json::from_value::<EndpointSlice>(slice).unwrap().slim()]);
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
    let name: Name = "web-0.web.ns.svc.cluster.local.".parse().unwrap();
    assert_eq!(zone.answer(&name, RecordType::A).unwrap().records.len(), 1);
    let answer = zone.answer(&"5.0.42.10.in-addr.arpa.".parse().unwrap(), RecordType::PTR).unwrap();
    assert_eq!(answer.records[0].data.to_string(), name.to_string());
}

#[test]
fn pods_have_their_address_in_their_name() {
    assert_eq!(shown("10-42-0-3.ns.pod", RecordType::A), "10.42.0.3");
    assert_eq!(shown("fd42--3.ns.pod", RecordType::AAAA), "fd42::3");
    assert_eq!(shown("x.ns.pod", RecordType::A), ABSENT);
}

#[test]
fn the_names_of_a_namespace_depend_on_its_existence() {
    let ask = |listed: Option<&[&str]>, name: &str| {
        let mut tables = tables();
        if let Some(all) = listed {
            tables.replace_namespaces(all.iter().map(|name| (*name).to_owned()).collect());
        }
        let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
        let name = Name::from_ascii(format!("{name}.cluster.local.")).unwrap();
        let answer = zone.answer(&name, RecordType::A).unwrap();
        (answer.code, answer.records.len())
    };
    let [none, absent] = [(ResponseCode::NoError, 0), (ResponseCode::NXDomain, 0)];
    for (listed, empty, pod_of_absent) in
        [(None, absent, (ResponseCode::NoError, 1)), (Some(&["ns", "empty"][..]), none, absent)]
    {
        assert_eq!(ask(listed, "ns.svc"), none, "{listed:?}");
        assert_eq!(ask(listed, "EMPTY.svc"), empty, "{listed:?}");
        assert_eq!(ask(listed, "empty.pod"), empty, "{listed:?}");
        assert_eq!(ask(listed, "web.empty.svc"), absent, "{listed:?}");
        assert_eq!(ask(listed, "absent.svc"), absent, "{listed:?}");
        assert_eq!(ask(listed, "10-42-0-3.empty.pod").1, 1, "{listed:?}");
        assert_eq!(ask(listed, "10-42-0-3.absent.pod"), pod_of_absent, "{listed:?}");
    }
}

#[test]
fn addresses_have_names() {
    let of = |name: &str| {
        let answer = ask(name, RecordType::PTR)?;
        Some(answer.records.iter().map(|record| record.data.to_string()).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(of("5.0.43.10.in-addr.arpa.").unwrap(), "web.ns.svc.cluster.local.");
    assert_eq!(of("7.0.42.10.in-addr.arpa.").unwrap(), "db-0.db.ns.svc.cluster.local.");
    assert!(of("9.0.42.10.in-addr.arpa.").is_none(), "the endpoint is not ready");
    assert!(of("1.1.1.1.in-addr.arpa.").is_none());
    assert!(ask("example.com.", RecordType::A).is_none());
    assert!(ask("xcluster.local.", RecordType::A).is_none());
}

#[test]
fn odd_bytes_are_unknown_names() {
    let name = Name::from_labels([&[0xff, 0, b'.'][..], b"ns", b"svc", b"cluster", b"local"]).unwrap();
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables())), Vec::new()).unwrap();
    assert_eq!(zone.answer(&name, RecordType::A).unwrap().code, ResponseCode::NXDomain);
}

#[test]
fn ports_with_equal_names_and_numbers_have_one_record() {
    let mut tables = tables();
    let ports: Vec<_> = (0..2000).map(|number| json!({"port": 1 + number % 700})).collect();
    let value = json!({"metadata": {"namespace": "ns", "name": "many"},
        "spec": {"clusterIP": "10.43.0.9", "ports": ports}});
    tables.put_service(Arc::new(serde_json::from_value(value).unwrap()));
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
    let name = Name::from_ascii("many.ns.svc.cluster.local.").unwrap();
    let answer = zone.answer(&name, RecordType::SRV).unwrap();
    assert_eq!((answer.records.len(), answer.additionals.len()), (700, 1));
}

/// An answer with every port of every endpoint would be gigabytes large.
#[test]
fn many_ports_of_many_endpoints_are_a_bounded_answer() {
    let mut all = tables();
    let ports: Vec<_> = (0..1000).map(|at| json!({"name": format!("p{at}"), "port": 1 + at})).collect();
    let slices = (0..40).map(|slice| {
        let address = |at: i32| format!("10.{slice}.{}.{}", at / 250, at % 250);
        let endpoints: Vec<_> = (0..1000)
            .map(|at| json!({"addresses": [address(at)], "hostname": format!("h{slice}-{at}")}))
            .collect();
        let labels = json!({"kubernetes.io/service-name": "db"});
        let slice = json!({"metadata": {"namespace": "ns", "name": format!("db-{slice}"), "labels": labels},
            "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
        serde_json::from_value::<EndpointSlice>(slice).unwrap().slim()
    });
    all.replace_slices(slices);
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(all)), Vec::new()).unwrap();
    let ask = |name: &str| zone.answer(&Name::from_ascii(name).unwrap(), RecordType::SRV).unwrap();
    assert_eq!(ask("db.ns.svc.cluster.local.").records.len(), RECORDS_MAX);
    let one = ask("_p999._tcp.db.ns.svc.cluster.local.");
    assert_eq!((one.records.len(), one.additionals.len()), (RECORDS_MAX, RECORDS_MAX));
}

/// A headless service with endpoints in slices of 1,000. `change` changes the endpoint with the given number.
fn many_endpoints(count: usize, change: impl Fn(usize, &mut Value)) -> Zone {
    let mut all = tables();
    let slices = (0..count.div_ceil(1000)).map(|slice| {
        let endpoint = |number: usize| {
            let address = format!("10.{}.{}.{}", number / 62_500, number / 250 % 250, number % 250);
            let mut endpoint = json!({"addresses": [address]});
            change(number, &mut endpoint);
            endpoint
        };
        let endpoints: Vec<_> = (slice * 1000..count.min((slice + 1) * 1000)).map(endpoint).collect();
        let labels = json!({"kubernetes.io/service-name": "db"});
        let slice = json!({"metadata": {"namespace": "ns", "name": format!("db-{slice:04}"), "labels": labels},
            "addressType": "IPv4", "ports": [{"name": "sql", "port": 5432}], "endpoints": endpoints});
        serde_json::from_value::<EndpointSlice>(slice).unwrap().slim()
    });
    all.replace_slices(slices);
    Zone::new("cluster.local", Arc::new(RwLock::new(all)), Vec::new()).unwrap()
}

#[test]
fn an_answer_is_built_up_to_the_size_of_the_reply() {
    let zone = many_endpoints(5000, |_, _| {});
    let name = Name::from_ascii("db.ns.svc.cluster.local.").unwrap();
    let count = |kind, most| zone.answer_up_to(&name, kind, most).unwrap().records.len();
    assert_eq!((count(RecordType::A, 50), count(RecordType::A, 5000)), (50, RECORDS_MAX));
    assert_eq!((count(RecordType::SRV, 50), count(RecordType::SRV, 5000)), (200, RECORDS_MAX));
}

#[test]
fn answers_with_a_part_of_many_endpoints_differ() {
    let zone = many_endpoints(5000, |_, _| {});
    let name = Name::from_ascii("db.ns.svc.cluster.local.").unwrap();
    let mut found = HashSet::new();
    for _ in 0..10_000 {
        let answer = zone.answer(&name, RecordType::A).unwrap();
        found.extend(answer.records.iter().map(|record| record.data.to_string()));
        if found.len() == 5000 {
            return;
        }
    }
    panic!("only {} endpoints are in the answers", found.len());
}

#[test]
fn equal_addresses_do_not_hide_other_ones() {
    let zone = many_endpoints(2000, |number, endpoint| {
        if number % 100 != 0 {
            endpoint["addresses"] = json!(["10.9.9.9"]);
        }
    });
    let answer = zone.answer_up_to(&"db.ns.svc.cluster.local.".parse().unwrap(), RecordType::A, 50).unwrap();
    assert_eq!(answer.records.len(), 21);
}

/// The author of a slice decides how many endpoints do not count.
#[test]
fn a_query_examines_a_limited_number_of_endpoints() {
    let not_ready = |number: usize, endpoint: &mut Value| {
        if number < EXAMINED_MAX {
            endpoint["conditions"] = json!({"ready": false});
        }
    };
    let zone = many_endpoints(EXAMINED_MAX + 1000, not_ready);
    let tables = zone.tables.read().unwrap();
    let endpoints = Endpoints::new(&tables, &Key::new("ns", "db"));
    assert_eq!((endpoints.hosts().count(), endpoints.count()), (0, EXAMINED_MAX));
    let zone = many_endpoints(2000, |number, endpoint| {
        if number > 0 {
            endpoint["conditions"] = json!({"ready": false});
        }
    });
    let answer = zone.answer(&"db.ns.svc.cluster.local.".parse().unwrap(), RecordType::A).unwrap();
    assert_eq!(answer.records.len(), 1, "endpoints below the limit are found");
}

#[test]
fn a_name_beyond_the_examined_endpoints_does_not_count_as_absent() {
    let named = |number: usize, endpoint: &mut Value| endpoint["hostname"] = json!(format!("h{number}"));
    let (first, last) = ("h0", format!("h{}", EXAMINED_MAX + 999));
    let of_large = [(first, ResponseCode::NoError), (last.as_str(), ResponseCode::ServFail)];
    let of_small = [(first, ResponseCode::NoError), (last.as_str(), ResponseCode::NXDomain)];
    for (count, expected) in [(EXAMINED_MAX + 1000, of_large), (2000, of_small)] {
        let zone = many_endpoints(count, named);
        for (host, code) in expected {
            let name = format!("{host}.db.ns.svc.cluster.local.").parse().unwrap();
            assert_eq!(zone.answer(&name, RecordType::A).unwrap().code, code, "{count} {host}");
        }
    }
}

#[test]
fn endpoints_whose_pods_are_not_ready_have_no_names() {
    let mut tables = tables();
    tables.set_ready("10.42.0.7".parse().unwrap(), false);
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
    let ask = |name: &str, kind| zone.answer(&name.parse().unwrap(), kind);
    assert_eq!(ask("db.ns.svc.cluster.local.", RecordType::A).unwrap().records.len(), 1);
    assert_eq!(ask("_sql._tcp.db.ns.svc.cluster.local.", RecordType::SRV).unwrap().records.len(), 1);
    assert_eq!(ask("db-0.db.ns.svc.cluster.local.", RecordType::A).unwrap().code, ResponseCode::NXDomain);
    assert!(ask("7.0.42.10.in-addr.arpa.", RecordType::PTR).is_none());
}
