//! Ordinary and malicious certificate requests.

use super::*;
use rcgen::{CertificateParams, DnType, KeyPair, PublicKeyData, SanType, SigningKey};

pub(crate) const CN: u8 = 3;
pub(crate) const O: u8 = 10;
const OU: u8 = 11;
pub(crate) const UTF8: u8 = 12;
const PRINTABLE: u8 = 19;
const TELETEX: u8 = 20;
const IA5: u8 = 22;

fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&[tag, 0x82][..], &length, &content].concat()
}

/// A signed request with this subject. Each part of the subject is a list of attributes: the x of the type 2.5.4.x, the
/// tag of the text, and the text.
pub(crate) fn raw(subject: &[&[(u8, u8, &str)]]) -> String {
    let attribute = |&(kind, tag, text): &(u8, u8, &str)| {
        tlv(0x30, &[&[0x06, 3, 0x55, 4, kind], &tlv(tag, &[text.as_bytes()])])
    };
    let part = |attributes: &&[(u8, u8, &str)]| {
        tlv(0x31, &[&attributes.iter().flat_map(attribute).collect::<Vec<_>>()])
    };
    let name = tlv(0x30, &[&subject.iter().flat_map(part).collect::<Vec<_>>()]);
    let key = KeyPair::generate().unwrap();
    let info = tlv(0x30, &[&[0x02, 1, 0], &name, &key.subject_public_key_info(), &[0xa0, 0]]);
    // ecdsa-with-SHA256, 1.2.840.10045.4.3.2
    let algorithm = [0x30, 10, 0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
    let signature = tlv(0x03, &[&[0], &key.sign(&info).unwrap()]);
    let request = tlv(0x30, &[&info, &algorithm, &signature]);
    let text = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, request);
    format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n")
}

fn node(names: &[&str]) -> CertificateParams {
    let mut params =
        CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "system:node:a");
    params.distinguished_name.push(DnType::OrganizationName, NODES);
    params
}

fn read(params: &CertificateParams) -> RequestedCertificate {
    let request = params.serialize_request(&KeyPair::generate().unwrap()).unwrap();
    RequestedCertificate::read(request.pem().unwrap().as_bytes()).unwrap()
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn a_request_is_read() {
    let requested = read(&node(&["a", "192.0.2.1"]));
    assert_eq!((requested.node(), requested.dns.as_slice()), (Some("a"), &["a".to_owned()][..]));
    assert_eq!(requested.addresses, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
    assert!(RequestedCertificate::read(b"nonsense").is_err());
}

#[test]
fn a_nodes_client_certificate_has_exactly_the_required_fields() {
    let usages = words(&["digital signature", "client auth"]);
    let good = read(&node(&[]));
    assert_eq!(good.refusal(NODE_CLIENT, &usages), None);
    assert_eq!(
        good.refusal(NODE_CLIENT, &words(&["key encipherment", "digital signature", "client auth"])),
        None
    );
    for wrong in [
        &["client auth"][..],
        &["digital signature", "server auth"],
        &["any", "digital signature", "client auth"],
    ] {
        assert!(good.refusal(NODE_CLIENT, &words(wrong)).is_some(), "{wrong:?}");
    }
    assert!(read(&node(&["a"])).refusal(NODE_CLIENT, &usages).is_some());
    for change in [
        |requested: &mut RequestedCertificate| requested.common_name = "root".to_owned(),
        |requested: &mut RequestedCertificate| requested.common_name = "system:node:".to_owned(),
        |requested: &mut RequestedCertificate| requested.organizations = vec!["system:masters".to_owned()],
        |requested: &mut RequestedCertificate| requested.organizations.push("system:masters".to_owned()),
        |requested: &mut RequestedCertificate| requested.organizations.clear(),
    ] {
        let mut wrong = good.clone();
        change(&mut wrong);
        assert!(wrong.refusal(NODE_CLIENT, &usages).is_some(), "{wrong:?}");
    }
}

#[test]
fn a_nodes_serving_certificate_names_hosts() {
    let usages = words(&["digital signature", "server auth"]);
    assert_eq!(read(&node(&["a"])).refusal(NODE_SERVING, &usages), None);
    assert!(read(&node(&[])).refusal(NODE_SERVING, &usages).is_some());
    let mut mail = node(&["a"]);
    mail.subject_alt_names.push(SanType::Rfc822Name("a@b".try_into().unwrap()));
    assert!(read(&mail).refusal(NODE_SERVING, &usages).is_some());
    assert!(
        read(&node(&["a"])).refusal(NODE_SERVING, &words(&["digital signature", "client auth"])).is_some()
    );
}

#[test]
fn client_certificates_of_users_have_the_client_usage_only() {
    let requested = read(&node(&["a"]));
    assert_eq!(requested.refusal(CLIENT, &words(&["client auth"])), None);
    assert!(requested.refusal(CLIENT, &words(&["client auth", "cert sign"])).is_some());
    assert!(requested.refusal(CLIENT, &words(&["digital signature"])).is_some());
    assert!(requested.refusal("example.com/other", &words(&["client auth"])).is_some());
}

#[test]
fn only_unambiguous_subjects_are_accepted() {
    let node = (CN, UTF8, "system:node:a");
    let controllers = (CN, UTF8, "system:kube-controller-manager");
    let nodes = (O, UTF8, NODES);
    for subject in
        [&[&[node][..], &[nodes]][..], &[&[nodes], &[node]], &[&[(CN, PRINTABLE, "system:node:a")], &[nodes]]]
    {
        let requested = RequestedCertificate::read(raw(subject).as_bytes()).unwrap();
        assert_eq!(
            (requested.node(), requested.organizations.as_slice()),
            (Some("a"), &[NODES.to_owned()][..])
        );
    }
    for (subject, why) in [
        (&[&[node][..], &[nodes], &[controllers]][..], "2 common names"),
        (&[&[controllers], &[node], &[nodes]], "2 common names"),
        (&[&[nodes], &[node], &[node]], "2 common names"),
        (&[&[nodes]], "0 common names"),
        (&[&[node, controllers], &[nodes]], "must have exactly one value"),
        (&[&[node, nodes]], "must have exactly one value"),
        (&[&[node], &[nodes], &[(OU, UTF8, "x")]], "attribute 2.5.4.11"),
        (&[&[(CN, TELETEX, "system:node:a")], &[nodes]], "unusual"),
        (&[&[(CN, IA5, "system:node:a")], &[nodes]], "unusual"),
        (&[&[node], &[(O, TELETEX, NODES)]], "unusual"),
        (&[&[(CN, UTF8, "system:node:a\0")], &[nodes]], "unusual"),
        (&[&[(CN, UTF8, "")], &[nodes]], "empty"),
    ] {
        let read = RequestedCertificate::read(raw(subject).as_bytes());
        assert!(read.as_ref().is_err_and(|said| said.contains(why)), "{subject:?}: {read:?}");
    }
}

#[test]
fn certificates_of_administrators_and_of_the_api_server_are_refused() {
    let requested = |group| {
        RequestedCertificate::read(raw(&[&[(CN, UTF8, "ann")], &[(O, UTF8, group)]]).as_bytes()).unwrap()
    };
    let usages = words(&["client auth"]);
    assert_eq!(requested("people").refusal(CLIENT, &usages), None);
    assert!(requested("system:masters").refusal(CLIENT, &usages).is_some());
    for name in SERVERS {
        let requested = RequestedCertificate::read(raw(&[&[(CN, UTF8, name)]]).as_bytes()).unwrap();
        assert!(requested.refusal(CLIENT, &usages).is_some(), "{name}");
    }
}

#[test]
fn a_request_is_signed_with_its_own_key() {
    let pem = raw(&[&[(CN, UTF8, "ann")]]);
    let (_, parsed) = parse_x509_pem(pem.as_bytes()).unwrap();
    let mut der = parsed.contents;
    let at = der.windows(3).position(|bytes| bytes == b"ann").unwrap();
    der[at] = b'e';
    let text = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, der);
    let changed = format!("-----BEGIN CERTIFICATE REQUEST-----\n{text}\n-----END CERTIFICATE REQUEST-----\n");
    assert!(RequestedCertificate::read(pem.as_bytes()).is_ok());
    assert!(RequestedCertificate::read(changed.as_bytes()).is_err());
}
