use std::path::PathBuf;
use std::sync::RwLock;

use coracle_services::Tables;
use hickory_proto::rr::RData;
use hickory_proto::rr::rdata::A;
use serde_json::json;

use super::*;
use crate::answer::Ttls;

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

fn decide(bytes: &[u8], zone: &Zone) -> Reply {
    reply(bytes, Transport::Udp, Sources { zone, upstream: &upstream() })
}

fn now(bytes: &[u8], zone: &Zone) -> Message {
    response(bytes, Transport::Udp, zone).message
}

fn response(bytes: &[u8], transport: Transport, zone: &Zone) -> Response {
    match reply(bytes, transport, Sources { zone, upstream: &upstream() }) {
        Reply::Now(response) => response,
        Reply::Forward(_) => panic!("forwarded"),
        Reply::Nothing => panic!("no reply"),
    }
}

#[test]
fn a_long_reply_is_truncated_for_udp_and_whole_for_tcp() {
    let zone = zone(500);
    let question = query("many.ns.svc.cluster.local.", |_| {});
    let by_udp = response(&question, Transport::Udp, &zone);
    assert!(by_udp.records() <= 43, "{} records for 512 bytes", by_udp.records());
    let bytes = by_udp.encode().unwrap();
    let short = Message::from_vec(&bytes).unwrap();
    assert!(bytes.len() <= 512 && short.metadata.truncation);
    // The header has 12 bytes, the question 31 and each record 16. The encoder needs room for the whole name, which has
    // 27 bytes, before it replaces the name by a pointer of 2 bytes.
    assert_eq!((short.queries.len(), short.answers.len()), (1, (512 - 12 - 31 - (27 - 2)) / 16 + 1));
    let cut = response(&question, Transport::Tcp, &zone);
    assert!(cut.is_cut() && cut.records() == SMALL_RECORDS + 1, "all records are built without the permit");
    let long = response(&question, Transport::TcpLarge, &zone).encode().unwrap();
    let long = Message::from_vec(&long).unwrap();
    assert!(!long.metadata.truncation && long.answers.len() == 500);
    let with_edns = query("many.ns.svc.cluster.local.", |message| {
        let mut edns = Edns::new();
        edns.set_max_payload(65_535);
        message.set_edns(edns);
    });
    let with_edns = response(&with_edns, Transport::Udp, &zone);
    assert_eq!(with_edns.limit, UDP_PAYLOAD);
    let bytes = with_edns.encode().unwrap();
    let short = Message::from_vec(&bytes).unwrap();
    assert!(bytes.len() <= usize::from(UDP_PAYLOAD) && short.metadata.truncation && short.edns.is_some());
    assert!(short.answers.len() >= (1232 - 12 - 31) / 16 - 1);
}

#[test]
fn a_reply_without_room_for_additional_records_keeps_its_answers() {
    let mut message = Message::clone(&answer(3));
    message.additionals.clone_from(&answer(100).answers);
    message.set_edns(Edns::new());
    let short = Message::from_vec(&Response::new(message).encode().unwrap()).unwrap();
    assert!(short.metadata.truncation && short.edns.is_some());
    assert_eq!((short.answers.len(), short.additionals.len()), (3, 0));
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
        reply(&with_flag(dnssec_ok), Transport::Udp, Sources { zone: &zone(0), upstream: &upstream });
    }
    let counted = "coredns_dns_do_requests_total{server=\"dns://:53\",view=\"\",zone=\".\"} 1";
    assert!(upstream.metrics.render().lines().any(|line| line == counted));
}

#[test]
fn names_outside_the_cluster_are_forwarded() {
    let bytes = query("example.com.", |_| {});
    assert!(matches!(decide(&bytes, &zone(0)), Reply::Forward(_)));
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
        assert!(matches!(decide(silent, &zone), Reply::Nothing));
    }
}

#[test]
fn cut_and_changed_messages_do_not_panic() {
    let zone = zone(3);
    let whole = query("many.ns.svc.cluster.local.", |message| {
        message.set_edns(Edns::new());
    });
    for end in 0..whole.len() {
        decide(&whole[..end], &zone);
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[end] ^= flip;
            decide(&bytes, &zone);
        }
    }
}

#[test]
fn messages_with_many_questions_or_records_are_refused_by_their_header() {
    let question = Query::query(Name::from_ascii("a.".repeat(100)).unwrap(), RecordType::A);
    let record = Record::from_rdata(Name::root(), 1, RData::A(A([1, 2, 3, 4].into())));
    let many: [fn(&mut Message, &Query, &Record); 4] = [
        |message, question, _| message.queries = vec![question.clone(); 200],
        |message, _, record| message.answers = vec![record.clone(); 2],
        |message, _, record| message.authorities = vec![record.clone(); 2],
        |message, _, record| message.additionals = vec![record.clone(); 3],
    ];
    for change in many {
        let bytes = query("a.", |message| change(message, &question, &record));
        let refused = now(&bytes, &zone(0));
        assert_eq!(refused.metadata.response_code, ResponseCode::FormErr);
        assert!(refused.queries.is_empty(), "the questions are not decoded");
        let update = query("a.", |message| {
            message.metadata.op_code = OpCode::Update;
            change(message, &question, &record);
        });
        assert_eq!(now(&update, &zone(0)).metadata.response_code, ResponseCode::NotImp);
    }
}

/// The reply to a query for `name` with this answer of another server.
fn forwarded(name: &str, transport: Transport, answer: &Arc<Message>) -> Response {
    let bytes = query(name, |_| {});
    match reply(&bytes, transport, Sources { zone: &zone(0), upstream: &upstream() }) {
        Reply::Forward(pending) => pending.merged(ServerAnswer::Decoded(Arc::clone(answer))),
        Reply::Now(_) | Reply::Nothing => panic!("not forwarded"),
    }
}

/// An answer with this number of addresses of `example.com`.
fn answer(count: u32) -> Arc<Message> {
    let mut answer = Message::response(1, OpCode::Query);
    let name = Name::from_ascii("example.com.").unwrap();
    let data = |number: u32| RData::A(A(number.into()));
    answer.add_answers((0..count).map(|number| Record::from_rdata(name.clone(), 60, data(number))));
    Arc::new(answer)
}

#[test]
fn waiting_clients_share_an_answer_and_its_encoding_ends_at_the_size_of_the_reply() {
    let answer = answer(5000);
    for name in ["example.com.", "eXample.com."] {
        let waiting: Vec<_> = (0..100).map(|_| forwarded(name, Transport::Udp, &answer)).collect();
        assert_eq!(Arc::strong_count(&answer), 101);
        for response in &waiting {
            assert_eq!(response.records(), 5000);
            let (_, header) = response.emit(None).unwrap();
            assert!(header.counts.answers < 43 && header.metadata.truncation);
        }
        let copies = waiting[0].forwarded.as_ref().unwrap().answers(waiting[0].max_records()).0.len();
        assert_eq!(copies, if name == "example.com." { 0 } else { 43 });
        let short = Message::from_vec(&waiting[0].encode().unwrap()).unwrap();
        assert!(short.metadata.truncation && short.answers.len() > 20);
    }
    let long = forwarded("example.com.", Transport::Tcp, &answer).encode().unwrap();
    assert!(Message::from_vec(&long).unwrap().answers.len() > 1000);
}

#[test]
fn records_of_other_servers_have_the_name_in_the_spelling_of_the_client() {
    for transport in [Transport::Udp, Transport::Tcp] {
        for name in ["example.com.", "eXample.COM."] {
            let bytes = forwarded(name, transport, &answer(3)).encode().unwrap();
            let message = Message::from_vec(&bytes).unwrap();
            assert_eq!(message.answers.len(), 3);
            let expected = Name::from_ascii(name).unwrap();
            assert!(message.answers.iter().all(|record| record.name.eq_case(&expected)), "{message}");
        }
    }
}

#[test]
fn a_large_answer_is_decoded_for_tcp_and_its_first_records_for_udp() {
    // The encoder compresses only the first names.
    let mut whole = Message::clone(&answer(2000));
    whole.add_query(Query::query(Name::from_ascii("example.com.").unwrap(), RecordType::A));
    let ttls = Ttls::Fresh { most: 60, age: 20 };
    let large = LargeAnswer::new(whole.to_vec().unwrap().into(), ResponseCode::NoError, ttls);
    let merged = |transport| {
        let bytes = query("eXample.com.", |_| {});
        match reply(&bytes, transport, Sources { zone: &zone(0), upstream: &upstream() }) {
            Reply::Forward(pending) => pending.merged(ServerAnswer::Large(large.clone())),
            Reply::Now(_) | Reply::Nothing => panic!("not forwarded"),
        }
    };
    let by_udp = merged(Transport::Udp);
    assert!(by_udp.records() <= 43, "{} records are decoded", by_udp.records());
    let short = Message::from_vec(&by_udp.encode().unwrap()).unwrap();
    assert!(short.metadata.truncation && short.answers.len() > 20);
    let by_tcp = merged(Transport::Tcp);
    assert!(by_tcp.records() > SMALL_RECORDS && by_tcp.forwarded.is_none(), "decoded without a turn");
    let long = Message::from_vec(&by_tcp.decoded().encode().unwrap()).unwrap();
    assert_eq!(long.answers.len(), 2000);
    let expected = Name::from_ascii("eXample.com.").unwrap();
    assert!(long.answers.iter().all(|record| record.ttl == 40 && record.name.eq_case(&expected)));
}

#[test]
fn aliases_of_aliases_are_followed_and_loops_fail() {
    let mut tables = Tables::default();
    let alias = |name: &str, target: &str| {
        let target = format!("{target}.ns.svc.cluster.local");
        json!({"metadata": {"namespace": "ns", "name": name},
            "spec": {"type": "ExternalName", "externalName": target}})
    };
    let web = json!({"metadata": {"namespace": "ns", "name": "web"}, "spec": {"clusterIP": "10.43.0.5"}});
    let chain = (1..=ALIASES_MAX).map(|number| alias(&format!("a{}", number + 1), &format!("a{number}")));
    let short = [alias("one", "two"), alias("two", "web"), alias("a1", "web")];
    let all = short.into_iter().chain(chain).chain([alias("left", "right"), alias("right", "left"), web]);
    tables.replace_services(all.map(|service| Arc::new(serde_json::from_value(service).unwrap())));
    tables.replace_slices([]);
    let zone = Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap();
    let found = now(&query("one.ns.svc.cluster.local.", |_| {}), &zone);
    assert_eq!(found.answers.len(), 3);
    assert!(matches!(found.answers[2].data, RData::A(_)));
    let longest = now(&query(&format!("a{ALIASES_MAX}.ns.svc.cluster.local."), |_| {}), &zone);
    assert_eq!(longest.answers.len(), ALIASES_MAX + 1);
    for name in [format!("a{}", ALIASES_MAX + 1), "left".to_owned()] {
        let failed = now(&query(&format!("{name}.ns.svc.cluster.local."), |_| {}), &zone);
        assert_eq!(failed.metadata.response_code, ResponseCode::ServFail, "{name}");
        assert!(failed.answers.is_empty());
    }
}

#[test]
fn a_truncated_answer_is_truncated_for_udp_and_a_failure_for_tcp() {
    let mut truncated = Message::clone(&answer(3));
    truncated.metadata.truncation = true;
    let truncated = Arc::new(truncated);
    let sent = |transport| {
        Message::from_vec(&forwarded("example.com.", transport, &truncated).encode().unwrap()).unwrap()
    };
    let by_udp = sent(Transport::Udp);
    assert!(by_udp.metadata.truncation && by_udp.answers.len() == 3);
    let by_tcp = sent(Transport::Tcp);
    assert_eq!(by_tcp.metadata.response_code, ResponseCode::ServFail);
    assert!(!by_tcp.metadata.truncation && by_tcp.answers.is_empty());
}

#[test]
fn the_flag_do_is_copied() {
    for dnssec_ok in [true, false] {
        let bytes = query("none.ns.svc.cluster.local.", |message| {
            let mut edns = Edns::new();
            edns.set_dnssec_ok(dnssec_ok);
            message.set_edns(edns);
        });
        assert_eq!(now(&bytes, &zone(0)).edns.unwrap().flags().dnssec_ok, dnssec_ok);
    }
}
