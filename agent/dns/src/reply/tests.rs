use std::path::PathBuf;
use std::sync::RwLock;

use coracle_services::Tables;
use hickory_proto::rr::Name;
use serde_json::json;

use super::*;

fn zone(endpoints: usize) -> Zone {
    let mut tables = Tables::default();
    let service = json!({"metadata": {"namespace": "ns", "name": "many"}, "spec": {"clusterIP": "None"}});
    tables.replace_services([Arc::new(serde_json::from_value(service).unwrap())]);
    let address =
        |number: usize| format!("10.{}.{}.{}", 1 + number / 65_536, number / 256 % 256, number % 256);
    let endpoints: Vec<_> = (0..endpoints).map(|number| json!({"addresses": [address(number)]})).collect();
    let slice = json!({"metadata": {"namespace": "ns", "name": "x", "labels": {"kubernetes.io/service-name": "many"}},
        "addressType": "IPv4", "endpoints": endpoints});
    tables.replace_slices([serde_json::from_value::<coracle_services::EndpointSlice>(slice).unwrap().slim()]);
    Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap()
}

fn upstream() -> Arc<Upstream> {
    Arc::new(Upstream::new(PathBuf::from("/nonexistent"), Vec::new(), &[], Arc::default()))
}

fn query(name: &str, change: impl FnOnce(&mut Message)) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    change(&mut message);
    message.to_vec().unwrap()
}

fn now(bytes: &[u8], zone: &Zone) -> Message {
    match reply(bytes, zone, &upstream()) {
        Reply::Now(message) => message,
        Reply::Forward(_) => panic!("forwarded"),
        Reply::Nothing => panic!("no reply"),
    }
}

#[test]
fn a_long_reply_is_truncated_for_udp_and_whole_for_tcp() {
    let zone = zone(500);
    let question = query("many.ns.svc.cluster.local.", |_| {});
    let message = now(&question, &zone);
    assert_eq!(message.answers.len(), 500);
    let bytes = encode(&message, udp_size(&question)).unwrap();
    let short = Message::from_vec(&bytes).unwrap();
    assert!(bytes.len() <= 512 && short.metadata.truncation && short.answers.is_empty());
    assert_eq!(short.queries.len(), 1);
    let long = Message::from_vec(&encode(&message, u16::MAX).unwrap()).unwrap();
    assert!(!long.metadata.truncation && long.answers.len() == 500);
    let with_edns = query("many.ns.svc.cluster.local.", |message| {
        let mut edns = Edns::new();
        edns.set_max_payload(65_535);
        message.set_edns(edns);
    });
    assert_eq!(udp_size(&with_edns), UDP_PAYLOAD);
    assert!(now(&with_edns, &zone).edns.is_some());
}

#[test]
fn negative_replies_have_the_zones_soa() {
    for (name, code) in [
        ("none.ns.svc.cluster.local.", ResponseCode::NXDomain),
        ("ns.svc.cluster.local.", ResponseCode::NoError),
    ] {
        let message = now(&query(name, |_| {}), &zone(0));
        assert_eq!((message.metadata.response_code, message.authorities.len()), (code, 1));
        assert!(message.metadata.authoritative);
    }
}

#[test]
fn queries_that_accept_signatures_are_counted() {
    let upstream = upstream();
    let with_flag = |dnssec_ok| {
        query("example.com.", |message| {
            let mut edns = Edns::new();
            edns.set_dnssec_ok(dnssec_ok);
            message.set_edns(edns);
        })
    };
    for dnssec_ok in [true, false] {
        reply(&with_flag(dnssec_ok), &zone(0), &upstream);
    }
    let counted = "coredns_dns_do_requests_total{server=\"dns://:53\",view=\"\",zone=\".\"} 1";
    assert!(upstream.metrics.render().lines().any(|line| line == counted));
}

#[test]
fn names_outside_the_cluster_are_forwarded() {
    let bytes = query("example.com.", |_| {});
    assert!(matches!(reply(&bytes, &zone(0), &upstream()), Reply::Forward(_)));
}

#[test]
fn malformed_messages_get_an_error_or_no_response() {
    let zone = zone(0);
    let code = |bytes: &[u8]| now(bytes, &zone).metadata.response_code;
    assert_eq!(code(&query("a.", |message| message.metadata.op_code = OpCode::Update)), ResponseCode::NotImp);
    assert_eq!(code(&query("a.", |message| message.queries.clear())), ResponseCode::FormErr);
    let two = query("a.", |message| message.queries.push(message.queries[0].clone()));
    assert_eq!(code(&two), ResponseCode::FormErr);
    let chaos = query("a.", |message| message.queries[0].query_class = DNSClass::CH);
    assert_eq!(code(&chaos), ResponseCode::Refused);
    let transfer = query("cluster.local.", |message| message.queries[0].query_type = RecordType::AXFR);
    assert_eq!(code(&transfer), ResponseCode::Refused);
    assert_eq!(
        code(&[&[0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0][..], &[0xff; 9]].concat()),
        ResponseCode::FormErr
    );
    let response = query("a.", |message| message.metadata.message_type = MessageType::Response);
    for silent in [&response[..], &[], &[0; 5], &[0xff; 40]] {
        assert!(matches!(reply(silent, &zone, &upstream()), Reply::Nothing));
    }
}

#[test]
fn cut_and_changed_messages_do_not_panic() {
    let zone = zone(3);
    let whole = query("many.ns.svc.cluster.local.", |message| {
        message.set_edns(Edns::new());
    });
    for end in 0..whole.len() {
        reply(&whole[..end], &zone, &upstream());
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[end] ^= flip;
            reply(&bytes, &zone, &upstream());
        }
    }
}
