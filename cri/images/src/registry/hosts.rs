//! The hosts of a registry's content: `hosts.toml` in containerd's layout.
//!
//! The first of these directories that exists is used: `<dir>/<host>_<port>_`, `<dir>/<host[:port]>`, `<dir>/_default`.
//! Mirrors come in the order of its `hosts.toml`, then the server itself. In a directory without this file, only
//! certificates in Docker's layout are used.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::host_match::is_address_of;

/// A host to send requests to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// Base URL of all requests, such as `https://registry-1.docker.io/v2`.
    pub(crate) base: String,
    /// Capability "resolve": may resolve tags.
    pub(crate) resolve: bool,
    /// Capability "pull": may serve content.
    pub(crate) pull: bool,
    /// Whether the host is not the registry in the image's name.
    pub(crate) mirror: bool,
    pub(crate) tls: TlsFiles,
    pub(crate) headers: Vec<(String, String)>,
    /// Timeout of a connection attempt, if configured.
    pub(crate) dial_timeout: Option<Duration>,
}

/// TLS settings of a host, in addition to the system's certificate authorities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    pub(crate) ca: Vec<PathBuf>,
    /// Certificates with their keys. Without a key file, the certificate's file contains the key, too.
    pub(crate) client: Vec<(PathBuf, Option<PathBuf>)>,
    pub(crate) skip_verify: bool,
}

/// Errors of a `hosts.toml`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostsError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot parse {}", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("{}: {what}", path.display())]
    Value { path: PathBuf, what: String },
}

#[derive(Debug, Default, Deserialize)]
struct Section {
    capabilities: Option<Vec<String>>,
    #[serde(default)]
    ca: OneOrMany<String>,
    #[serde(default)]
    client: Client,
    #[serde(default)]
    skip_verify: bool,
    #[serde(default)]
    override_path: bool,
    dial_timeout: Option<String>,
    #[serde(default)]
    header: std::collections::BTreeMap<String, OneOrMany<String>>,
}

/// A file with certificate and key, or a list of such files or of pairs of files.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Client {
    One(String),
    Many(Vec<OneOrMany<String>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// Maximum bytes of a hosts.toml.
const FILE_MAX: u64 = 1 << 20;

/// The hosts for a registry's content, in order.
pub(crate) fn load(directory: Option<&Path>, domain: &str) -> Result<Vec<Host>, HostsError> {
    for name in directory_names(domain) {
        let Some(directory) = directory else { break };
        let path = directory.join(name).join("hosts.toml");
        let text = coracle_tree::read(&path, FILE_MAX).and_then(|bytes| {
            String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        });
        match text {
            Ok(text) => return parse(&text, &path, domain),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                if let Some(tls) = certificates(&path)? {
                    return Ok(vec![Host { tls, ..server(domain) }]);
                }
            }
            Err(source) => return Err(HostsError::Read { path, source }),
        }
    }
    Ok(vec![server(domain)])
}

/// Certificates in Docker's layout, for a directory without a `hosts.toml`: authorities as `*.crt`, client
/// certificate and key as `*.cert` and `*.key`. `None` if the directory does not exist.
fn certificates(file: &Path) -> Result<Option<TlsFiles>, HostsError> {
    let Some(directory) = file.parent().filter(|directory| directory.is_dir()) else { return Ok(None) };
    let error = |source| HostsError::Read { path: directory.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(error)? {
        files.push(entry.map_err(error)?.path());
    }
    files.sort();
    let with = |end: &str| {
        let end = end.to_owned();
        files.iter().filter(move |path| path.extension().is_some_and(|e| e == end.as_str())).cloned()
    };
    let client = with("cert").map(|path| (path.clone(), Some(path.with_extension("key"))));
    Ok(Some(TlsFiles { ca: with("crt").collect(), client: client.collect(), skip_verify: false }))
}

/// The registry itself, with default settings.
fn server(domain: &str) -> Host {
    let (host, port) = split_port(domain);
    // As in containerd and docker: a registry on this machine uses plain HTTP, except on port 443.
    let scheme = if is_loopback(host) && port != Some("443") { "http" } else { "https" };
    let address = if domain == "docker.io" { "registry-1.docker.io" } else { domain };
    Host {
        base: format!("{scheme}://{address}/v2"),
        resolve: true,
        pull: true,
        mirror: false,
        tls: TlsFiles::default(),
        headers: Vec::new(),
        dial_timeout: None,
    }
}

/// Whether a host name always means this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn split_port(domain: &str) -> (&str, Option<&str>) {
    match domain.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (domain, None),
    }
}

fn directory_names(domain: &str) -> Vec<String> {
    let mut names = match split_port(domain) {
        (host, Some(port)) => vec![format!("{host}_{port}_")],
        _ => Vec::new(),
    };
    names.extend([domain.to_owned(), "_default".to_owned()]);
    names
}

pub(super) fn parse(text: &str, path: &Path, domain: &str) -> Result<Vec<Host>, HostsError> {
    let parse_error = |source| HostsError::Parse { path: path.to_owned(), source: Box::new(source) };
    let mut table: toml::Table = toml::from_str(text).map_err(parse_error)?;
    let hosts = match table.remove("host") {
        Some(toml::Value::Table(hosts)) => hosts,
        Some(_) => {
            return Err(HostsError::Value { path: path.to_owned(), what: "host is not a table".into() });
        }
        None => toml::Table::new(),
    };
    let mut sections: Vec<(String, toml::Value)> = hosts.into_iter().collect();
    // Hosts are tried in the order of the file. The parsed table does not keep this order.
    let order = host_order(text);
    sections.sort_by_key(|(url, _)| order.iter().position(|o| o == url).unwrap_or(usize::MAX));
    let mut found = Vec::new();
    for (url, section) in sections {
        let section: Section = section.try_into().map_err(parse_error)?;
        found.push(host(&url, &section, path, domain)?);
    }
    let address = table.remove("server");
    let own: Section = toml::Value::Table(table).try_into().map_err(parse_error)?;
    found.push(match address {
        Some(toml::Value::String(url)) if !url.is_empty() => host(&url, &own, path, domain)?,
        Some(toml::Value::String(_)) | None => {
            let plain = server(domain);
            Host { base: plain.base.clone(), ..host(&plain.base, &own, path, domain)? }
        }
        Some(_) => {
            return Err(HostsError::Value { path: path.to_owned(), what: "server is not a string".into() });
        }
    });
    Ok(found)
}

/// The keys of `[host.…]` in the order of the text. The parser's spans give the order.
fn host_order(text: &str) -> Vec<String> {
    let Ok(table) = toml::de::DeTable::parse(text) else { return Vec::new() };
    let Some(toml::de::DeValue::Table(hosts)) = table.get_ref().get("host").map(|host| host.get_ref()) else {
        return Vec::new();
    };
    let mut keys: Vec<(usize, String)> =
        hosts.iter().map(|(key, _)| (key.span().start, key.get_ref().to_string())).collect();
    keys.sort();
    keys.into_iter().map(|(_, key)| key).collect()
}

fn host(url: &str, section: &Section, path: &Path, domain: &str) -> Result<Host, HostsError> {
    let bad = |what: String| HostsError::Value { path: path.to_owned(), what };
    let able = |what: &str| {
        section.capabilities.as_ref().is_none_or(|all| all.is_empty() || all.iter().any(|c| c == what))
    };
    // Empty names are ignored: the key's name is empty if one file contains certificate and key.
    let files = |names: &OneOrMany<String>| {
        names.iter().filter(|n| !n.is_empty()).map(|n| relative_to(path, n)).collect::<Vec<_>>()
    };
    let pairs: Vec<Vec<PathBuf>> = match &section.client {
        Client::One(file) => vec![vec![relative_to(path, file)]],
        Client::Many(entries) => entries.iter().map(files).collect(),
    };
    let pairs = pairs.into_iter().map(|pair| match pair.as_slice() {
        [both] => Ok((both.clone(), None)),
        [certificate, key] => Ok((certificate.clone(), Some(key.clone()))),
        _ => Err(bad(format!("client of {url} is neither a file nor a pair of files"))),
    });
    let client = pairs.collect::<Result<Vec<_>, _>>()?;
    let dial_timeout = match &section.dial_timeout {
        Some(text) => Some(
            duration(text)
                .ok_or_else(|| bad(format!("dial_timeout {text:?} is not a duration, such as 30s")))?,
        ),
        None => None,
    };
    let headers = section.header.iter();
    let base = base_url(url, section.override_path)
        .ok_or_else(|| bad(format!("{url:?} is not a valid http or https address")))?;
    Ok(Host {
        mirror: !is_address_of(&base, domain),
        base,
        resolve: able("resolve"),
        pull: able("pull"),
        tls: TlsFiles { ca: files(&section.ca), client, skip_verify: section.skip_verify },
        headers: headers
            .flat_map(|(name, values)| values.iter().map(|v| (name.clone(), v.clone())))
            .collect(),
        dial_timeout,
    })
}

/// The base URL for an address. The path ends in `/v2`, unless the file overrides it.
fn base_url(url: &str, override_path: bool) -> Option<String> {
    let full = if url.contains("://") {
        url.to_owned()
    } else {
        let host = url.split('/').next().unwrap_or(url);
        let scheme = if is_loopback(split_port(host).0) { "http" } else { "https" };
        format!("{scheme}://{url}")
    };
    let base = full.trim_end_matches('/');
    let base = if override_path || base.ends_with("/v2") { base.to_owned() } else { format!("{base}/v2") };
    // The URL is checked again with the suffix, because parsers accept spaces at the end, but not in the middle.
    let usable = |text: &str| {
        let url = text.parse::<reqwest::Url>();
        url.is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
    };
    (usable(&full) && usable(&base)).then_some(base)
}

/// A duration in Go's format.
fn duration(text: &str) -> Option<Duration> {
    text.parse::<jiff::SignedDuration>().ok()?.try_into().ok()
}

/// A path relative to the file's directory.
fn relative_to(file: &Path, name: &str) -> PathBuf {
    file.parent().map_or_else(|| PathBuf::from(name), |directory| directory.join(name))
}

// === impl Client ===

impl Default for Client {
    fn default() -> Client {
        Client::Many(Vec::new())
    }
}

// === impl OneOrMany ===

impl<T> OneOrMany<T> {
    fn iter(&self) -> std::slice::Iter<'_, T> {
        match self {
            OneOrMany::One(one) => std::slice::from_ref(one).iter(),
            OneOrMany::Many(many) => many.iter(),
        }
    }
}

impl<T> Default for OneOrMany<T> {
    fn default() -> OneOrMany<T> {
        OneOrMany::Many(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{HostsError, base_url, directory_names, load, parse};

    fn bases(text: &str, domain: &str) -> Vec<String> {
        let hosts = parse(text, Path::new("/c/x/hosts.toml"), domain).unwrap();
        hosts.into_iter().map(|host| host.base).collect()
    }

    #[test]
    fn without_configuration_the_registry_itself_is_used() {
        for (domain, base) in [
            ("docker.io", "https://registry-1.docker.io/v2"),
            ("registry.k8s.io", "https://registry.k8s.io/v2"),
            ("example.com:8443", "https://example.com:8443/v2"),
            ("localhost:5000", "http://localhost:5000/v2"),
            ("localhost", "http://localhost/v2"),
            ("127.0.0.1:443", "https://127.0.0.1:443/v2"),
            ("127.1.2.3:80", "http://127.1.2.3:80/v2"),
            ("[::1]:5000", "http://[::1]:5000/v2"),
        ] {
            assert_eq!(load(None, domain).unwrap()[0].base, base);
        }
    }

    #[test]
    fn mirrors_come_in_the_order_of_the_file_and_the_server_last() {
        let text = r#"
            server = "https://registry.example"
            [host."http://z.example:5000"]
            [host."https://a.example/mirror"]
            [host."https://m.example/some/path"]
            override_path = true
            [host."b.example"]
        "#;
        let expected = [
            "http://z.example:5000/v2",
            "https://a.example/mirror/v2",
            "https://m.example/some/path",
            "https://b.example/v2",
            "https://registry.example/v2",
        ];
        assert_eq!(bases(text, "docker.io"), expected);
        assert_eq!(bases("", "docker.io"), ["https://registry-1.docker.io/v2"]);
    }

    #[test]
    fn capabilities_files_and_headers_are_read() {
        let text = r#"
            ca = "server.pem"
            [host."https://a"]
            capabilities = ["pull"]
            skip_verify = true
            ca = ["one.pem", "/abs/two.pem"]
            client = [["cert.pem", "key.pem"], "both.pem"]
            dial_timeout = "3s"
            [host."https://a".header]
            x-one = "1"
            x-two = ["2", "3"]
        "#;
        let hosts = parse(text, Path::new("/c/x/hosts.toml"), "r.example").unwrap();
        let first = &hosts[0];
        assert!(first.pull && !first.resolve && first.mirror && first.tls.skip_verify);
        assert_eq!(first.tls.ca, [PathBuf::from("/c/x/one.pem"), "/abs/two.pem".into()]);
        let pair = ("/c/x/cert.pem".into(), Some("/c/x/key.pem".into()));
        assert_eq!(first.tls.client, [pair, ("/c/x/both.pem".into(), None)]);
        assert_eq!(first.dial_timeout, Some(std::time::Duration::from_secs(3)));
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(first.headers, [header("x-one", "1"), header("x-two", "2"), header("x-two", "3")]);
        assert_eq!(hosts[1].tls.ca, [PathBuf::from("/c/x/server.pem")]);
        assert!(!hosts[1].mirror && hosts[1].resolve);
    }

    #[test]
    fn a_host_other_than_the_registry_counts_as_a_mirror() {
        let text = "server = \"https://s.example\"\n[host.\"https://r.example/x\"]\n[host.\"https://r.example:5000\"]\n";
        let mirrors = |domain: &str| {
            let hosts = parse(text, Path::new("/hosts.toml"), domain).unwrap();
            hosts.iter().map(|host| host.mirror).collect::<Vec<_>>()
        };
        assert_eq!(mirrors("r.example"), [false, true, true]);
        assert_eq!(mirrors("r.example:5000"), [true, false, true]);
        assert_eq!(mirrors("s.example"), [true, true, false]);
        let hub = parse("server = \"https://registry-1.docker.io\"", Path::new("/hosts.toml"), "docker.io")
            .unwrap();
        assert!(!hub[0].mirror);
    }

    #[test]
    fn invalid_files_are_refused() {
        for text in [
            "server = 1",
            "host = 1",
            "[host.\"ftp://a\"]",
            "[host.\"https://\"]",
            "not toml",
            "ca = 1",
            "dial_timeout = \"soon\"",
            "client = [[\"a.pem\", \"b.pem\", \"c.pem\"]]",
            "client = 1",
        ] {
            assert!(parse(text, Path::new("/hosts.toml"), "r.example").is_err(), "{text}");
        }
        assert_eq!(base_url("https://a/v2/", false).as_deref(), Some("https://a/v2"));
    }

    #[test]
    fn a_directory_of_certificates_is_read_as_in_docker() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("r.example:5000");
        std::fs::create_dir(&directory).unwrap();
        for name in ["ca.crt", "client.cert", "client.key", "README"] {
            std::fs::write(directory.join(name), "").unwrap();
        }
        let hosts = load(Some(place.path()), "r.example:5000").unwrap();
        assert_eq!((hosts.len(), hosts[0].base.as_str()), (1, "https://r.example:5000/v2"));
        assert_eq!(hosts[0].tls.ca, [directory.join("ca.crt")]);
        assert_eq!(
            hosts[0].tls.client,
            [(directory.join("client.cert"), Some(directory.join("client.key")))]
        );
        std::fs::write(directory.join("other.cert"), "").unwrap();
        let hosts = load(Some(place.path()), "r.example:5000").unwrap();
        assert_eq!(hosts[0].tls.client.len(), 2);
    }

    #[test]
    fn directories_are_named_as_in_containerd() {
        assert_eq!(directory_names("a.b:5000"), ["a.b_5000_", "a.b:5000", "_default"]);
        assert_eq!(directory_names("a.b"), ["a.b", "_default"]);
    }

    #[test]
    fn a_hosts_file_that_is_too_large_or_not_regular_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("example.com/hosts.toml");
        std::fs::create_dir(directory.path().join("example.com")).unwrap();
        let refused = || match load(Some(directory.path()), "example.com") {
            Err(HostsError::Read { source, .. }) => Some(source.kind()),
            _ => None,
        };
        std::fs::write(&file, " ".repeat((1 << 20) + 1)).unwrap();
        assert_eq!(refused(), Some(std::io::ErrorKind::FileTooLarge));
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        assert_eq!(refused(), Some(std::io::ErrorKind::InvalidInput));
    }
}
