//! An issuer in this process: a real HTTPS server with discovery document and key set.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use jsonwebtoken::{EncodingKey, Header, encode};
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::json;

use super::*;
use crate::{
    authn::oidc::config::{AuthenticationConfig, OidcConfig},
    cache::Cache,
};

struct Server {
    url: String,
    authority: String,
    key: KeyPair,
    /// The key set. A test may change it.
    keys: Arc<Mutex<Value>>,
    /// The token with distributed groups.
    groups: Arc<Mutex<String>>,
    /// The header `Authorization` of each request for the token with distributed groups.
    access: Arc<Mutex<Vec<String>>>,
    /// Number of fetched key sets.
    fetches: Arc<AtomicUsize>,
}

impl Server {
    async fn start() -> Self {
        let (acceptor, authority) = crate::test_tls::acceptor();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://127.0.0.1:{}", listener.local_addr().unwrap().port());
        let key = KeyPair::generate().unwrap();
        let document = json!({"issuer": url, "jwks_uri": format!("{url}/keys")}).to_string();
        let keys = Arc::new(Mutex::new(json!({"keys": [{"kty": "unknown"}, jwk(&key)]})));
        let (groups, access) = (Arc::<Mutex<String>>::default(), Arc::<Mutex<Vec<String>>>::default());
        let served = (keys.clone(), groups.clone(), access.clone());
        let fetches: Arc<AtomicUsize> = Arc::default();
        let counter = fetches.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let (document, served, counter) = (document.clone(), served.clone(), counter.clone());
                let service = service_fn(move |request: Request<Incoming>| {
                    let body = match request.uri().path() {
                        "/keys" => {
                            counter.fetch_add(1, Ordering::Relaxed);
                            served.0.lock().unwrap().to_string()
                        }
                        "/groups" => {
                            let header = request.headers().get("authorization");
                            let header = header.map_or("", |value| value.to_str().unwrap()).to_owned();
                            served.2.lock().unwrap().push(header);
                            served.1.lock().unwrap().clone()
                        }
                        _ => document.clone(),
                    };
                    async move { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(body))) }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { url, authority, key, keys, groups, access, fetches }
    }

    /// The issuer with other mappings and rules.
    fn issuers_with(&self, mappings: Value, rules: Value, user_rules: Value) -> Issuers {
        let issuer = json!({"url": self.url, "certificateAuthority": self.authority, "audiences": ["app"]});
        let jwt = json!({"issuer": issuer, "claimMappings": mappings, "claimValidationRules": rules,
            "userValidationRules": user_rules});
        let file = json!({
            "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration", "jwt": [jwt],
        });
        Issuers::new(AuthenticationConfig::parse(&file.to_string()).unwrap().issuers).unwrap()
    }

    fn issuers(&self) -> Issuers {
        let issuer = json!({"url": self.url, "certificateAuthority": self.authority, "audiences": ["app"]});
        let mappings = json!({
            "username": {"claim": "email", "prefix": "oidc:"}, "groups": {"claim": "groups", "prefix": "g:"},
            "uid": {"claim": "sub"},
        });
        let rules = json!([{"claim": "hd", "requiredValue": "example.com"}]);
        let file = json!({
            "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration",
            "jwt": [{"issuer": issuer, "claimMappings": mappings, "claimValidationRules": rules}],
        });
        Issuers::new(AuthenticationConfig::parse(&file.to_string()).unwrap().issuers).unwrap()
    }

    /// A token with good claims, changed by `change`.
    fn token(&self, change: Value) -> String {
        self.signed("one", &self.claims(change))
    }

    fn signed(&self, id: &str, claims: &Value) -> String {
        self.signed_by(&self.key, Some(id), claims)
    }

    fn signed_by(&self, key: &KeyPair, id: Option<&str>, claims: &Value) -> String {
        let header = Header { kid: id.map(str::to_owned), ..Header::new(Algorithm::ES256) };
        encode(&header, claims, &EncodingKey::from_ec_der(&key.serialize_der())).unwrap()
    }

    /// The good claims, changed by `change`.
    fn claims(&self, change: Value) -> Value {
        let mut claims = json!({
            "iss": self.url, "aud": ["app", "other"], "exp": jiff::Timestamp::now().as_second() + 60, "sub": "7",
            "email": "ann@example.com", "email_verified": true, "groups": ["dev"], "hd": "example.com",
        });
        claims.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        claims
    }
}

fn wanted(id: &str) -> KeyQuery<'_> {
    KeyQuery::new(Some(id), Some(Algorithm::ES256))
}

fn jwk(key: &KeyPair) -> Value {
    let point = key.der_bytes();
    let part = |range: std::ops::Range<usize>| BASE64_URL_SAFE_NO_PAD.encode(&point[range]);
    json!({"kty": "EC", "crv": "P-256", "kid": "one", "alg": "ES256", "x": part(1..33), "y": part(33..65)})
}

async fn user(issuers: &Issuers, token: &str) -> Option<User> {
    let cache = Cache::new(0);
    let credential = Credential { token: Some(token), ..Credential::none(&cache) };
    issuers.authenticate(&credential).await
}

#[tokio::test]
async fn a_token_of_the_issuer_names_a_user() {
    let server = Server::start().await;
    let issuers = server.issuers();
    let ann = user(&issuers, &server.token(json!({"jti": "x"}))).await.unwrap();
    assert_eq!((ann.name.as_str(), ann.uid.as_str()), ("oidc:ann@example.com", "7"));
    assert_eq!(ann.groups, ["g:dev", "system:authenticated"]);
    assert_eq!(ann.extra["authentication.kubernetes.io/credential-id"], ["JTI=x"]);
    let single = user(&issuers, &server.token(json!({"groups": "ops"}))).await.unwrap();
    assert_eq!(single.groups, ["g:ops", "system:authenticated"]);
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn invalid_and_foreign_tokens_are_refused() {
    let server = Server::start().await;
    let issuers = server.issuers();
    let past = jiff::Timestamp::now().as_second() - 1;
    for change in [
        json!({"iss": "https://127.0.0.1:1"}),
        json!({"aud": "other"}),
        json!({"aud": null}),
        json!({"exp": past}),
        json!({"exp": null}),
        json!({"nbf": past + 3600}),
        json!({"email_verified": false}),
        json!({"email_verified": "true"}),
        json!({"email": null}),
        json!({"email": ""}),
        json!({"email": 7}),
        json!({"groups": [7]}),
        json!({"hd": "other.com"}),
        json!({"hd": null}),
        json!({"sub": null}),
    ] {
        assert_eq!(user(&issuers, &server.token(change.clone())).await, None, "{change}");
    }
    // Another key, a changed signature, no signature, and a secret that is the public key.
    let other =
        Server { key: KeyPair::generate().unwrap(), url: server.url.clone(), ..Server::start().await };
    assert_eq!(user(&issuers, &other.token(json!({}))).await, None);
    let good = server.token(json!({}));
    let (signed, _) = good.rsplit_once('.').unwrap();
    assert_eq!(user(&issuers, &format!("{signed}.AAAA")).await, None);
    let claims = json!({"iss": server.url, "aud": "app", "exp": past + 60, "sub": "7", "email": "ann@example.com", "hd": "example.com"});
    let secret = EncodingKey::from_secret(server.key.der_bytes());
    let header = Header { kid: Some("one".to_owned()), ..Header::new(Algorithm::HS256) };
    assert_eq!(user(&issuers, &encode(&header, &claims, &secret).unwrap()).await, None);
    for broken in ["", "a.b", "a.b.c", "a.b.c.d"] {
        assert_eq!(user(&issuers, broken).await, None);
    }
    assert!(user(&issuers, &good).await.is_some());
}

/// CVE-2025-30204: a token of very many parts filled the memory. CVE-2026-34986: an encrypted token ended the process.
#[tokio::test]
async fn cve_2025_30204_tokens_of_other_than_three_parts_are_refused() {
    let server = Server::start().await;
    let issuers = server.issuers();
    let good = server.token(json!({}));
    assert!(user(&issuers, &good).await.is_some());
    for more in [".".to_owned(), ".AAAA.AAAA".to_owned(), ".".repeat(1 << 20)] {
        for token in [format!("{good}{more}"), format!("{more}{good}")] {
            assert_eq!(unverified_issuer(&token), None);
            assert_eq!(user(&issuers, &token).await, None);
        }
    }
    let claims = good.split('.').nth(1).unwrap();
    let header = BASE64_URL_SAFE_NO_PAD.encode(r#"{"alg":"A128KW","enc":"A128GCM","kid":"one"}"#);
    for key in ["", claims] {
        let encrypted = format!("{header}.{key}.AAAA.AAAA.AAAA");
        assert_eq!(unverified_issuer(&encrypted), None);
        assert_eq!(user(&issuers, &encrypted).await, None);
    }
    // The same header in a token of three parts, which names the issuer.
    assert_eq!(user(&issuers, &format!("{header}.{claims}.AAAA")).await, None);
}

#[tokio::test]
async fn expressions_make_users_and_refuse_tokens() {
    let server = Server::start().await;
    let issuers = server.issuers_with(
        json!({
            "username": {"expression": "'oidc:' + claims.sub"}, "groups": {"expression": "claims.roles.split(',')"},
            "uid": {"expression": "claims.sub"},
            "extra": [{"key": "example.com/tenant", "valueExpression": "has(claims.tenant) ? claims.tenant : ''"}],
        }),
        json!([{"expression": "claims.hd == 'example.com'", "message": "another domain"}]),
        json!([{"expression": "!user.username.startsWith('system:')", "message": "reserved"},
            {"expression": "user.groups.all(group, group != 'system:masters')", "message": "reserved"}]),
    );
    let ann = user(&issuers, &server.token(json!({"roles": "dev,ops", "tenant": "t"}))).await.unwrap();
    assert_eq!((ann.name.as_str(), ann.uid.as_str()), ("oidc:7", "7"));
    assert_eq!(ann.groups, ["dev", "ops", "system:authenticated"]);
    assert_eq!(ann.extra["example.com/tenant"], ["t"]);
    let bob = user(&issuers, &server.token(json!({"roles": "dev"}))).await.unwrap();
    assert!(bob.extra.is_empty());
    for refused in [
        json!({}),
        json!({"roles": ["dev"]}),
        json!({"roles": "dev", "hd": "other"}),
        json!({"roles": "dev", "sub": 7}),
        json!({"roles": "dev,system:masters"}),
    ] {
        assert_eq!(user(&issuers, &server.token(refused.clone())).await, None, "{refused}");
    }
}

#[tokio::test]
async fn an_issuer_of_single_settings_accepts_its_algorithms_only() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let ca_file = directory.path().join("ca.crt");
    std::fs::write(&ca_file, &server.authority).unwrap();
    let name = async |algorithms: &[&str]| {
        let config = OidcConfig {
            issuer_url: server.url.clone(),
            client_id: "app".to_owned(),
            ca_file: Some(ca_file.clone()),
            username_claim: "sub".to_owned(),
            signing_algs: algorithms.iter().map(|&one| one.to_owned()).collect(),
            ..OidcConfig::default()
        };
        let issuers = Issuers::new(vec![config.issuer().unwrap()]).unwrap();
        user(&issuers, &server.token(json!({}))).await.map(|user| user.name)
    };
    // The tokens are signed with ES256.
    assert_eq!(name(&[]).await, None);
    assert_eq!(name(&["RS256", "ES512"]).await, None);
    assert_eq!(name(&["RS256", "ES256"]).await, Some(format!("{}#7", server.url)));
}

#[tokio::test]
async fn distributed_groups_are_read_from_the_endpoint_of_the_token() {
    let server = Server::start().await;
    let issuers = server.issuers();
    let serve = |claims: Value| *server.groups.lock().unwrap() = server.signed("one", &claims);
    let distributed = |source: Value| {
        let mut claims =
            server.claims(json!({"_claim_names": {"groups": "s"}, "_claim_sources": {"s": source}}));
        claims.as_object_mut().unwrap().remove("groups");
        server.signed("one", &claims)
    };
    let endpoint = format!("{}/groups", server.url);
    let token = distributed(json!({"endpoint": endpoint, "access_token": "secret"}));
    let good = server.claims(json!({"groups": ["ops", "dev"]}));
    serve(good.clone());
    let ann = user(&issuers, &token).await.unwrap();
    assert_eq!(ann.groups, ["g:ops", "g:dev", "system:authenticated"]);
    assert_eq!(*server.access.lock().unwrap(), ["Bearer secret"]);
    let past = jiff::Timestamp::now().as_second() - 1;
    for change in [
        json!({"iss": "https://127.0.0.1:1"}),
        json!({"aud": "other"}),
        json!({"exp": past}),
        json!({"nbf": past + 3600}),
        json!({"sub": "8"}),
        json!({"groups": 7}),
        json!({"groups": vec!["a"; 5000]}),
    ] {
        serve(server.claims(change.clone()));
        assert_eq!(user(&issuers, &token).await, None, "{change}");
    }
    // A text that is not a token, a token that another key signed, and a token that is too large.
    let other = server.signed_by(&KeyPair::generate().unwrap(), Some("one"), &good);
    let large = server.signed("one", &server.claims(json!({"groups": ["a".repeat(256 << 10)]})));
    for text in [String::new(), "a.b.c".to_owned(), other, large] {
        *server.groups.lock().unwrap() = text;
        assert_eq!(user(&issuers, &token).await, None);
    }
    let fetches = server.access.lock().unwrap().len();
    // A token with groups of its own needs no endpoint. An invalid token does not lead to a request.
    let with_groups =
        json!({"_claim_names": {"groups": "s"}, "_claim_sources": {"s": {"endpoint": endpoint}}});
    assert!(user(&issuers, &server.token(with_groups)).await.is_some());
    let (signed, _) = token.rsplit_once('.').unwrap();
    assert_eq!(user(&issuers, &format!("{signed}.AAAA")).await, None);
    let plain = distributed(json!({"endpoint": endpoint.replace("https", "http")}));
    assert_eq!(user(&issuers, &plain).await, None);
    assert_eq!(server.access.lock().unwrap().len(), fetches);
}

#[tokio::test]
async fn a_token_without_key_id_is_verified_with_each_key_up_to_a_limit() {
    let server = Server::start().await;
    let claims = server.claims(json!({}));
    let others: Vec<KeyPair> = (0..9).map(|_| KeyPair::generate().unwrap()).collect();
    let set = |keys: &[&KeyPair]| {
        let keys: Vec<Value> = keys.iter().map(|key| jwk(key)).collect();
        *server.keys.lock().unwrap() = json!({"keys": keys});
    };
    let all: Vec<&KeyPair> = others.iter().collect();
    set(&all);
    let issuers = server.issuers();
    for id in [None, Some("")] {
        let of = |key: &KeyPair| server.signed_by(key, id, &claims);
        assert!(user(&issuers, &of(&others[0])).await.is_some());
        assert!(user(&issuers, &of(&others[7])).await.is_some());
        // The ninth key is not tried, and a key of another server is refused.
        assert_eq!(user(&issuers, &of(&others[8])).await, None);
        assert_eq!(user(&issuers, &of(&KeyPair::generate().unwrap())).await, None);
    }
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1, "no fetch within the interval");
    let unknown = server.signed_by(&others[0], Some("two"), &claims);
    assert_eq!(user(&issuers, &unknown).await, None, "a key id names one key");
}

#[tokio::test]
async fn a_key_that_replaces_another_one_is_found_for_tokens_without_key_id() {
    let server = Server::start().await;
    let keys = Arc::new(Keys::new(&server.issuers().0[0].config).unwrap());
    let without_id = KeyQuery::new(None, Some(Algorithm::ES256));
    let old = keys.find(without_id).await.unwrap();
    assert_eq!(old.len(), 1);
    *server.keys.lock().unwrap() = json!({"keys": [jwk(&KeyPair::generate().unwrap())]});
    assert!(keys.newer(without_id, &old).await.is_empty(), "within the interval");
    tokio::time::pause();
    tokio::time::advance(std::time::Duration::from_secs(11)).await;
    tokio::time::resume();
    let newer = keys.newer(without_id, &old).await;
    assert_eq!(newer.len(), 1);
    assert_ne!(newer, old);
    assert!(keys.newer(without_id, &newer).await.is_empty());
}

#[tokio::test]
async fn unknown_keys_cause_one_fetch_within_the_interval() {
    let server = Server::start().await;
    let issuers = server.issuers();
    for number in 0..20 {
        let token = server.signed(&format!("k{number}"), &json!({"iss": server.url}));
        assert_eq!(user(&issuers, &token).await, None);
    }
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn requests_that_waited_for_a_silent_issuer_do_not_ask_it_again() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = format!(
        "{{apiVersion: apiserver.config.k8s.io/v1, kind: AuthenticationConfiguration, jwt: [{{issuer: {{url: \
         'https://{}', audiences: [b]}}, claimMappings: {{username: {{claim: sub, prefix: ''}}}}}}]}}",
        silent.local_addr().unwrap()
    );
    let config = AuthenticationConfig::parse(&config).unwrap().issuers.pop().unwrap();
    let keys = Arc::new(Keys::new(&config).unwrap());
    let (first, second) = tokio::join!(keys.find(wanted("a")), keys.find(wanted("b")));
    assert!(first.is_err());
    assert!(second.unwrap().is_empty());
}

#[tokio::test]
async fn a_client_that_disconnects_does_not_end_the_fetch_of_the_keys() {
    let server = Server::start().await;
    let keys = Arc::new(Keys::new(&server.issuers().0[0].config).unwrap());
    let mut cancelled = Box::pin(keys.find(wanted("unknown")));
    assert!(futures::poll!(cancelled.as_mut()).is_pending());
    drop(cancelled);
    assert_eq!(keys.find(wanted("one")).await.unwrap().len(), 1);
    assert_eq!(server.fetches.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn look_ups_of_an_issuer_have_the_limits_of_other_look_ups() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let keys_of = |host: &str| {
        let config = format!(
            "{{apiVersion: apiserver.config.k8s.io/v1, kind: AuthenticationConfiguration, jwt: [{{issuer: {{url: \
             'https://{host}:{port}', audiences: [b]}}, claimMappings: {{username: {{claim: sub, prefix: ''}}}}}}]}}"
        );
        let config = AuthenticationConfig::parse(&config).unwrap().issuers.pop().unwrap();
        Arc::new(Keys::new(&config).unwrap())
    };
    let keys = keys_of("localhost");
    let slots = crate::resolver::occupy().await;
    let mut find = Box::pin(keys.find(wanted("a")));
    // Later requests that need no look-up overtake it. The issuer keeps their connections and answers none.
    let mut accepted = Vec::new();
    for _ in 0..3 {
        let by_address = keys_of("127.0.0.1");
        tokio::select! {
            biased;
            found = find.as_mut() => panic!("all slots are occupied: {:?}", found.err()),
            _found = by_address.find(wanted("a")) => panic!("the issuer does not answer"),
            connection = silent.accept() => accepted.push(connection.unwrap()),
        }
    }
    let another = futures::FutureExt::now_or_never(silent.accept());
    assert!(another.is_none(), "all slots are occupied");
    drop(slots);
    tokio::select! {
        found = find => panic!("the issuer was not asked: {:?}", found.err()),
        accepted = silent.accept() => drop(accepted.unwrap()),
    }
}
