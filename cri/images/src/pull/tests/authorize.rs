//! Authorization of pulls: passwords, tokens, mirrors, certificates.

use std::sync::Mutex;

use super::store;
use crate::fixture::{PASSWORD, ProxyFault, TestImage, TestProxy, TestRegistry, TlsProxy, USER};
use crate::{Auth, ErrorKind, Images, ImagesConfig, Login};

/// A client certificate issued by an authority of this name, and its key.
fn certified(name: &str) -> (rcgen::Certificate, rcgen::KeyPair) {
    let mut parameters = rcgen::CertificateParams::new(vec!["client".to_owned()]).unwrap();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, name);
    let key = rcgen::KeyPair::generate().unwrap();
    (parameters.self_signed(&key).unwrap(), key)
}

fn login(password: &str) -> Login {
    Auth::Basic { username: USER.into(), password: password.into() }.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_sent_when_requested() {
    let registry = TestRegistry::start_with_password().await;
    registry.push("private", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let name = registry.name("private");
    let basic = |password: &str| Some(login(password));
    for auth in [None, basic("wrong"), Some(Auth::RegistryToken("x".into()).into())] {
        let error = images.pull(&name, auth, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unauthorized, "{}", error.report());
        assert!(!error.report().contains("wrong"));
    }
    images.pull(&name, basic(PASSWORD), None).await.unwrap();
    assert_eq!(images.pull(&name, None, None).await.unwrap_err().kind(), ErrorKind::Unauthorized);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_fetched_and_renewed_when_they_expire() {
    let registry = TestRegistry::start().await;
    registry.push("private", "latest", &TestImage::small("x")).await;
    let service = TestProxy::to(registry.address(), |head, number| {
        let first = head.lines().next().unwrap();
        let allowed = head.contains("authorization: Basic dXNlcjpzM2NyZXQ=") || first.starts_with("POST");
        if !allowed || !(first.contains("service=test") || first.starts_with("POST")) {
            return ProxyFault::Reply("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n".into());
        }
        let body = format!("{{\"token\":\"t{number}\",\"access_token\":null}}");
        ProxyFault::Reply(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    })
    .await;
    let realm = service.address().to_owned();
    // Every token is valid for two requests.
    let uses = Mutex::new(std::collections::HashMap::<String, usize>::new());
    let line = TestProxy::to(registry.address(), move |head, _| {
        let token = head.lines().find_map(|l| l.strip_prefix("authorization: Bearer "));
        let mut uses = uses.lock().unwrap();
        if let Some(token) = token {
            let used = uses.entry(token.to_owned()).or_default();
            *used += 1;
            if *used <= 2 {
                return ProxyFault::Pass;
            }
        }
        ProxyFault::Reply(format!(
            "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer realm=\"http://{realm}/token\",service=\"test\",scope=\"repository:private:pull\"\r\ncontent-length: 0\r\n\r\n"
        ))
    })
    .await;
    let name = line.name("private");
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let error = images.pull(&name, None, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unauthorized, "{}", error.report());
    images.pull(&name, Some(login(PASSWORD)), None).await.unwrap();
    assert!(
        service.requests().iter().any(|h| h.contains("scope=repository%3Aprivate%3Apull")),
        "{:?}",
        service.requests()
    );
    let before = service.count("POST");
    images.pull(&name, Some(Auth::IdentityToken("refresh".into()).into()), None).await.unwrap();
    assert!(service.count("POST") > before);
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_are_used_and_image_names_stay_unchanged() {
    let registry = TestRegistry::start().await;
    let image = TestImage::small("x");
    registry.push("e2e/busybox", "1", &image).await;
    let reserved = coracle_testing::ClosedPort::reserve();
    let dead = reserved.address();
    let line = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let hosts = tempfile::tempdir().unwrap();
    std::fs::create_dir(hosts.path().join("registry.example")).unwrap();
    let text = format!(
        "server = \"http://{dead}\"\n[host.\"http://{dead}\"]\n[host.\"http://{}\"]\n",
        line.address()
    );
    std::fs::write(hosts.path().join("registry.example/hosts.toml"), text).unwrap();
    let root = tempfile::tempdir().unwrap();
    let config =
        ImagesConfig { registry_config_dir: Some(hosts.path().to_owned()), ..ImagesConfig::new(root.path()) };
    let images = Images::open(config).await.unwrap();
    let pulled = images.pull("registry.example/e2e/busybox:1", None, None).await.unwrap();
    assert_eq!(pulled.tags, ["registry.example/e2e/busybox:1"]);
    assert_eq!(pulled.id, image.id());
    assert!(line.count("?ns=registry.example") > 0);
    let error = images.pull("registry.example/no/such", None, None).await.unwrap_err();
    assert!(error.report().contains("404"), "{}", error.report());
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_get_the_ns_parameter_and_the_registry_does_not() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let line = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let hosts = tempfile::tempdir().unwrap();
    for (key, is_mirror) in [("server", true), ("own", false)] {
        let domain = if is_mirror { "registry.example" } else { line.address() };
        std::fs::create_dir(hosts.path().join(domain)).unwrap();
        let text = match key {
            "server" => format!("server = \"http://{}\"\n", line.address()),
            _ => format!("[host.\"http://{}\"]\n", line.address()),
        };
        std::fs::write(hosts.path().join(domain).join("hosts.toml"), text).unwrap();
        let root = tempfile::tempdir().unwrap();
        let directory = Some(hosts.path().to_owned());
        let config = ImagesConfig { registry_config_dir: directory, ..ImagesConfig::new(root.path()) };
        let images = Images::open(config).await.unwrap();
        let before = line.requests().len();
        let name = format!("{domain}/app");
        images.pull(&name, None, None).await.unwrap();
        // The image is in the store, so this pull is one request without a body.
        images.pull(&name, None, None).await.unwrap();
        let requests = &line.requests()[before..];
        let lines: Vec<&str> = requests.iter().filter_map(|head| head.lines().next()).collect();
        for part in ["GET /v2/app/manifests/", "GET /v2/app/blobs/", "HEAD /v2/app/manifests/"] {
            let mut matching = lines.iter().filter(|line| line.starts_with(part)).peekable();
            assert!(matching.peek().is_some(), "{part} is not among {lines:?}");
            assert!(matching.all(|line| line.contains("?ns=registry.example ") == is_mirror
                && line.contains("?ns=") == is_mirror));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_sent_only_to_their_host() {
    let registry = TestRegistry::start_with_password().await;
    registry.push("private", "latest", &TestImage::small("x")).await;
    let mirror = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let own = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let hosts = tempfile::tempdir().unwrap();
    let directory = hosts.path().join(own.address());
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("hosts.toml"), format!("[host.\"http://{}\"]\n", mirror.address()))
        .unwrap();
    let token = Login::from(Auth::RegistryToken("t0ken".into()));
    let to_mirror = Login { address: format!("http://{}/v2/", mirror.address()), ..login(PASSWORD) };
    let to_other = Login { address: "other.example".into(), ..login(PASSWORD) };
    // `works` is the expected result. `shown` is true for each host that got credentials: first the mirror, then the
    // registry.
    for (login, works, shown) in [
        (login(PASSWORD), true, (false, true)),
        (token, false, (false, true)),
        (to_mirror, true, (true, false)),
        (to_other, false, (false, false)),
    ] {
        let root = tempfile::tempdir().unwrap();
        let directory = Some(hosts.path().to_owned());
        let config = ImagesConfig { registry_config_dir: directory, ..ImagesConfig::new(root.path()) };
        let images = Images::open(config).await.unwrap();
        let (before, own_before) = (mirror.requests().len(), own.requests().len());
        let pulled = images.pull(&own.name("private"), Some(login), None).await;
        assert_eq!(pulled.is_ok(), works, "{:?}", pulled.map_err(|error| error.report()).err());
        let got_credentials = |heads: &[String]| heads.iter().any(|head| head.contains("authorization:"));
        assert_eq!(
            (got_credentials(&mirror.requests()[before..]), got_credentials(&own.requests()[own_before..])),
            shown
        );
        assert!(mirror.requests().len() > before, "the mirror got a request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_not_sent_to_redirect_targets() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let storage = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let to = storage.address().to_owned();
    let line = TestProxy::to(registry.address(), move |head, _| {
        let path = head.split(' ').nth(1).unwrap();
        match path.contains("/blobs/") {
            true => ProxyFault::Reply(format!(
                "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{to}{path}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )),
            false => ProxyFault::Pass,
        }
    })
    .await;
    let hosts = tempfile::tempdir().unwrap();
    std::fs::create_dir(hosts.path().join("registry.example")).unwrap();
    let text = format!(
        "[host.\"http://{0}\"]\n[host.\"http://{0}\".header]\nauthorization = \"Basic eDp5\"\n",
        line.address()
    );
    std::fs::write(hosts.path().join("registry.example/hosts.toml"), text).unwrap();
    for (name, login) in [
        (line.name("app"), Some(Auth::RegistryToken("t0ken".into()).into())),
        ("registry.example/app".to_owned(), None),
    ] {
        let root = tempfile::tempdir().unwrap();
        let directory = Some(hosts.path().to_owned());
        let config = ImagesConfig { registry_config_dir: directory, ..ImagesConfig::new(root.path()) };
        let images = Images::open(config).await.unwrap();
        let (before, on) = (line.requests().len(), storage.requests().len());
        images.pull(&name, login, None).await.map_err(|error| error.report()).unwrap();
        assert!(
            line.requests()[before..].iter().all(|head| head.contains("authorization:")),
            "{:?}",
            line.requests()
        );
        assert!(storage.requests().len() > on && !storage.requests().concat().contains("authorization:"));
    }
}

/// A registry that requires a token of a service at `realm`, and that redirects requests for blobs to another host.
async fn with_token_and_redirect(registry: &TestRegistry, realm: &str, storage: &str) -> TestProxy {
    let (realm, storage) = (realm.to_owned(), storage.to_owned());
    TestProxy::to(registry.address(), move |head, _| {
        let path = head.split(' ').nth(1).unwrap();
        if !head.contains("authorization: Bearer") {
            return ProxyFault::Reply(format!(
                "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer realm=\"{realm}\"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            ));
        }
        match path.contains("/blobs/") {
            true => ProxyFault::Reply(format!(
                "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{storage}{path}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )),
            false => ProxyFault::Pass,
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_hosts_toml_are_sent_only_to_their_host() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let storage = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let service = TestProxy::to("127.0.0.1:1", |_, _| {
        let body = r#"{"token":"t"}"#;
        let length = body.len();
        ProxyFault::Reply(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        ))
    })
    .await;
    let realm = format!("http://{}/token", service.address());
    let line = with_token_and_redirect(&registry, &realm, storage.address()).await;
    let hosts = tempfile::tempdir().unwrap();
    std::fs::create_dir(hosts.path().join("registry.example")).unwrap();
    let text = format!(
        "[host.\"http://{0}\"]\n[host.\"http://{0}\".header]\nx-secret = [\"s3cret\", \"more\"]\naccept = \"x/y\"\n\
            user-agent = \"special/1\"\n",
        line.address()
    );
    std::fs::write(hosts.path().join("registry.example/hosts.toml"), text).unwrap();
    let root = tempfile::tempdir().unwrap();
    let directory = Some(hosts.path().to_owned());
    let config = ImagesConfig { registry_config_dir: directory, ..ImagesConfig::new(root.path()) };
    let images = Images::open(config).await.unwrap();
    images.pull("registry.example/app", None, None).await.map_err(|error| error.report()).unwrap();
    let has_both = |head: &String| head.contains("x-secret: s3cret") && head.contains("x-secret: more");
    assert!(line.requests().iter().all(has_both), "{:?}", line.requests());
    assert!(!line.requests().concat().contains("x/y"), "the request sets the header accept");
    for other in [&storage, &service] {
        let requests = other.requests();
        assert!(!requests.is_empty() && !requests.concat().contains("x-secret"), "{requests:?}");
        assert!(requests.iter().all(|head| head.contains("user-agent: special/1")), "{requests:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refresh_token_is_not_sent_to_redirect_targets_of_the_token_service() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let other = TestProxy::to("127.0.0.1:1", |_, _| {
        ProxyFault::Reply("HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"token\":\"t\"}".into())
    })
    .await;
    let to = other.address().to_owned();
    let service = TestProxy::to("127.0.0.1:1", move |_, _| {
        ProxyFault::Reply(format!(
            "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{to}/token\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        ))
    })
    .await;
    let realm = format!("http://{}/token", service.address());
    let line = with_token_and_redirect(&registry, &realm, registry.address()).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let login = Auth::IdentityToken("refresh".into()).into();
    images.pull(&line.name("app"), Some(login), None).await.unwrap_err();
    assert!(service.count("POST") > 0);
    assert!(other.requests().is_empty(), "{:?}", other.requests());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_without_tls_may_redirect_to_a_host_with_tls() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let storage = TlsProxy::to(registry.address()).await;
    let to = storage.address.clone();
    let line = TestProxy::to(registry.address(), move |head, _| {
        let path = head.split(' ').nth(1).unwrap();
        match path.contains("/blobs/") {
            true => ProxyFault::Reply(format!(
                "HTTP/1.1 307 Temporary Redirect\r\nlocation: https://{to}{path}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )),
            false => ProxyFault::Pass,
        }
    })
    .await;
    let hosts = tempfile::tempdir().unwrap();
    let directory = hosts.path().join("registry.example");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("ca.pem"), &storage.certificate).unwrap();
    let text = format!("server = \"http://{}\"\nca = \"ca.pem\"\n", line.address());
    std::fs::write(directory.join("hosts.toml"), text).unwrap();
    let root = tempfile::tempdir().unwrap();
    let config =
        ImagesConfig { registry_config_dir: Some(hosts.path().to_owned()), ..ImagesConfig::new(root.path()) };
    let images = Images::open(config).await.unwrap();
    images.pull("registry.example/app", None, None).await.map_err(|error| error.report()).unwrap();
    assert!(line.count("/blobs/") > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_registries_are_verified_by_the_authorities_of_hosts_toml() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let line = TlsProxy::to(registry.address()).await;
    let hosts = tempfile::tempdir().unwrap();
    let directory = hosts.path().join("tls.example");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("ca.pem"), &line.certificate).unwrap();
    let root = tempfile::tempdir().unwrap();
    let config =
        ImagesConfig { registry_config_dir: Some(hosts.path().to_owned()), ..ImagesConfig::new(root.path()) };
    let images = Images::open(config).await.unwrap();
    for (extra, works) in [("", false), ("ca = \"ca.pem\"", true), ("skip_verify = true", true)] {
        let text = format!("server = \"https://{}\"\n{extra}\n", line.address);
        std::fs::write(directory.join("hosts.toml"), text).unwrap();
        let pulled = images.pull("tls.example/app", None, None).await;
        match pulled {
            Ok(_) => assert!(works, "{extra}"),
            Err(error) => {
                assert!(!works, "{extra}: {}", error.report());
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                assert!(error.report().to_lowercase().contains("certificate"), "{}", error.report());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_certificate_of_hosts_toml_is_presented() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let [ours, other] = ["ours", "other"].map(certified);
    let line = TlsProxy::for_client(registry.address(), ours.0.der().clone()).await;
    let hosts = tempfile::tempdir().unwrap();
    let directory = hosts.path().join("tls.example");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("ca.pem"), &line.certificate).unwrap();
    for (name, one) in [("ours", &ours), ("other", &other)] {
        std::fs::write(directory.join(format!("{name}.cert")), one.0.pem()).unwrap();
        std::fs::write(directory.join(format!("{name}.key")), one.1.serialize_pem()).unwrap();
        let both = one.0.pem() + &one.1.serialize_pem();
        std::fs::write(directory.join(format!("{name}.pem")), both).unwrap();
    }
    let cases = [
        ("", false),
        ("client = [[\"other.cert\", \"other.key\"]]", false),
        ("client = [[\"ours.cert\", \"ours.key\"]]", true),
        ("client = \"ours.pem\"", true),
        ("client = [[\"other.cert\", \"other.key\"], [\"ours.cert\", \"ours.key\"]]", true),
        ("client = [[\"ours.cert\", \"ours.key\"], [\"other.cert\", \"other.key\"]]", true),
        ("client = [\"other.pem\", \"ours.pem\"]", true),
    ];
    for (extra, works) in cases {
        let text = format!("server = \"https://{}\"\nca = \"ca.pem\"\n{extra}\n", line.address);
        std::fs::write(directory.join("hosts.toml"), text).unwrap();
        // Each case has its own store, which has no open connection.
        let root = tempfile::tempdir().unwrap();
        let config = ImagesConfig {
            registry_config_dir: Some(hosts.path().to_owned()),
            ..ImagesConfig::new(root.path())
        };
        let images = Images::open(config).await.unwrap();
        let pulled = images.pull("tls.example/app", None, None).await;
        assert_eq!(pulled.is_ok(), works, "{extra}: {:?}", pulled.map_err(|error| error.report()).err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn text_of_token_services_and_redirect_targets_is_not_passed_on() {
    let reply = |status: &str, body: &str| {
        ProxyFault::Reply(format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    };
    let oci = r#"{"errors":[{"code":"DENIED","message":"AKIA-SECRET"}]}"#;
    for (status, body) in [
        ("403 Forbidden", "AKIA-SECRET"),
        ("403 Forbidden", oci),
        ("200 OK", "\"AKIA-SECRET\""),
        ("200 OK", r#"{"token":["AKIA-SECRET"]}"#),
        ("200 OK", "AKIA-SECRET"),
    ] {
        let service = TestProxy::to("127.0.0.1:1", move |_, _| reply(status, body)).await;
        let realm = format!("http://u:PASS-SECRET@{}/latest/meta-data?key=QUERY-SECRET", service.address());
        let registry = TestProxy::to("127.0.0.1:1", move |_, _| {
            ProxyFault::Reply(format!(
                "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer realm=\"{realm}\"\r\ncontent-length: 0\r\n\r\n"
            ))
        })
        .await;
        let report = refusal(&registry.name("app")).await;
        assert!(!report.contains("SECRET"), "{report}");
        assert!(report.contains(service.address()), "{report}");
        assert!(!service.requests().is_empty(), "the token service got a request");
    }
    let inside = TestProxy::to("127.0.0.1:1", move |_, _| reply("403 Forbidden", oci)).await;
    let to = inside.address().to_owned();
    let registry = TestProxy::to("127.0.0.1:1", move |_, _| {
        ProxyFault::Reply(format!(
            "HTTP/1.1 302 Found\r\nlocation: http://{to}/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        ))
    })
    .await;
    let report = refusal(&registry.name("app")).await;
    assert!(report.contains("403") && !report.contains("SECRET"), "{report}");
    for (body, shown) in [(oci, true), ("AKIA-SECRET", false), (r#"{"schemaVersion":"AKIA-SECRET"}"#, false)]
    {
        let status = if body.contains("schema") { "200 OK" } else { "403 Forbidden" };
        let registry = TestProxy::to("127.0.0.1:1", move |_, _| reply(status, body)).await;
        let report = refusal(&registry.name("app")).await;
        assert_eq!(
            report.contains("SECRET"),
            shown,
            "only the registry's own error document is passed on: {report}"
        );
    }
}

/// The report of a failing pull.
async fn refusal(name: &str) -> String {
    let root = tempfile::tempdir().unwrap();
    store(root.path()).await.pull(name, None, None).await.unwrap_err().report()
}
