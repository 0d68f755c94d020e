//! Tests of TLS between the store and etcd.

use std::path::Path;

use coracle_testing::{eventually_async, skip};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::Server;
use crate::{
    Error, Expect, Store, Tier,
    etcd::{Etcd, EtcdIdentity, EtcdOptions, EtcdTls, api::RangeRequest, connection::Connection},
    suite::{commit, put},
};

/// A certificate authority.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

// === impl Authority ===

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Writes a certificate for these hosts and its key.
    fn sign(&self, directory: &Path, name: &str, hosts: &[&str]) -> EtcdIdentity {
        let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let key = KeyPair::generate().unwrap();
        let signed = CertificateParams::new(hosts).unwrap().signed_by(&key, &self.issuer).unwrap();
        let certificate = directory.join(format!("{name}.crt"));
        let key_file = directory.join(format!("{name}.key"));
        std::fs::write(&certificate, signed.pem()).unwrap();
        std::fs::write(&key_file, key.serialize_pem()).unwrap();
        EtcdIdentity { certificate, key: key_file }
    }

    /// Writes the certificates of the authority, of etcd and of a client. Returns the client's files.
    fn write_all(&self, directory: &Path) -> EtcdTls {
        let authority = directory.join("ca.crt");
        std::fs::write(&authority, &self.pem).unwrap();
        let _server = self.sign(directory, "server", &["127.0.0.1"]);
        // etcd compares addresses of a client's certificate with the client's address.
        EtcdTls { authority, identity: Some(self.sign(directory, "client", &[])) }
    }
}

/// Starts an etcd with the certificates of a directory, which verifies its clients. `None` if etcd is not built.
fn start(directory: &Path) -> Option<Server> {
    let file = |flag: &str, name: &str| format!("--{flag}={}", directory.join(name).display());
    let flags = vec![
        file("cert-file", "server.crt"),
        file("key-file", "server.key"),
        file("trusted-ca-file", "ca.crt"),
        "--client-cert-auth".to_owned(),
    ];
    Server::launch("https", flags)
}

async fn connect(server: &Server, tls: &EtcdTls) -> Etcd {
    Etcd::connect(EtcdOptions { tls: Some(tls.clone()), ..server.options("p") }).await.unwrap()
}

/// The reason why a request with these TLS files fails.
async fn failure(url: String, tls: &EtcdTls) -> String {
    let connection = Connection::new(&[url], Some(tls)).unwrap();
    let request = RangeRequest { key: b"/".to_vec(), ..RangeRequest::default() };
    match connection.range(request).await {
        Err(Error::Unavailable { detail }) => detail,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_and_the_store_verify_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let (authority, other) = (Authority::new("authority"), Authority::new("other"));
    let tls = authority.write_all(directory.path());
    let Some(server) = start(directory.path()) else { skip!("etcd is not built: run scripts/etcd") };
    let store = connect(&server, &tls).await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let written = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, written);

    let wrong = directory.path().join("wrong.crt");
    std::fs::write(&wrong, &other.pem).unwrap();
    let untrusted = EtcdTls { authority: wrong, ..tls.clone() };
    let text = failure(server.url(), &untrusted).await;
    assert!(text.contains("invalid peer certificate"), "{text}");
    // The server's certificate is for the address only.
    let text = failure(server.url().replace("127.0.0.1", "localhost"), &tls).await;
    assert!(text.contains("invalid peer certificate"), "{text}");

    let stranger = other.sign(directory.path(), "stranger", &[]);
    for identity in [None, Some(stranger)] {
        let text = failure(server.url(), &EtcdTls { identity, ..tls.clone() }).await;
        assert!(!text.contains("invalid peer certificate"), "{text}");
    }
    store.revision().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_tls_files_are_used_without_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let tls = Authority::new("first").write_all(directory.path());
    let Some(mut server) = start(directory.path()) else { skip!("etcd is not built: run scripts/etcd") };
    let store = connect(&server, &tls).await;
    let mut watch = store.watch("", store.revision().await.unwrap()).await.unwrap();
    let first = store.write(put("/a", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, first);
    server.kill();
    Authority::new("second").write_all(directory.path());
    server.resume(&Server::built());
    eventually_async("the store to use the renewed files", 20, async || store.revision().await.is_ok()).await;
    let second = store.write(put("/b", Expect::Absent, "1", Tier::Durable)).await.unwrap();
    assert_eq!(commit(&mut watch).await.revision, second);
}
