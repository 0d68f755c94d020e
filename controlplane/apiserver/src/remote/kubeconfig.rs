//! A kubeconfig file: the server of its current context, and the credentials. Fields of clusters and users that are not
//! supported are refused.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde::Deserialize;

use super::Credential;
use crate::bounded_file;

/// Maximum bytes of a kubeconfig file, and of each file that the kubeconfig file names.
const LIMIT: u64 = 1 << 20;

/// The client settings of a kubeconfig file.
pub(super) struct Parsed {
    pub(super) url: String,
    pub(super) credential: Credential,
    pub(super) tls: rustls::ClientConfig,
}

/// A user with its credentials.
pub(super) struct User {
    pub(super) name: String,
    pub(super) credential: Credential,
    pub(super) certificate: Option<ClientCertificate>,
}

/// A certificate with the certificates of its authorities, and the private key.
pub(crate) struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default, rename = "current-context")]
    current_context: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    #[serde(default)]
    user: UserFields,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct UserFields {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<String>,
    password: Option<String>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    #[serde(default)]
    cluster: String,
    #[serde(default)]
    user: String,
}

/// Reads the users of the file, and the name of the user of the current context, which may be empty.
pub(super) fn users(path: &Path) -> Result<(Vec<User>, String), String> {
    let (file, base) = parse(path)?;
    let mut users = Vec::new();
    for NamedUser { name, user } in &file.users {
        let failed = |why: String| format!("users: {name:?}: {why}");
        let credential = credential(user, base).map_err(failed)?;
        let certificate = client_certificate(user, base).map_err(failed)?;
        users.push(User { name: name.clone(), credential, certificate });
    }
    let current = file.contexts.into_iter().find(|one| one.name == file.current_context);
    Ok((users, current.map(|one| one.context.user).unwrap_or_default()))
}

/// The contents of the file, and its directory. Relative paths in the file start at this directory.
fn parse(path: &Path) -> Result<(File, &Path), String> {
    let text = read_file(path)?;
    let file = serde_yaml_ng::from_slice(&text).map_err(|error| error.to_string())?;
    Ok((file, path.parent().unwrap_or(Path::new("."))))
}

/// Reads the server and the user of the current context.
pub(super) fn read(path: &Path) -> Result<Parsed, String> {
    let (file, base) = parse(path)?;
    let contexts = &file.contexts;
    let current = contexts.iter().find(|one| one.name == file.current_context);
    // As upstream, a file with one context needs no current-context.
    let current = current.or(if contexts.len() == 1 { contexts.first() } else { None });
    let current = current.ok_or_else(|| format!("current-context {:?}: not found", file.current_context))?;
    let context = &current.context;
    let cluster = file.clusters.iter().find(|one| one.name == context.cluster);
    let cluster = &cluster.ok_or_else(|| format!("clusters: {:?} not found", context.cluster))?.cluster;
    let none = UserFields::default();
    let user = file.users.iter().find(|one| one.name == context.user).map(|one| &one.user);
    let user = match (user, context.user.as_str()) {
        (Some(user), _) => user,
        (None, "") => &none,
        (None, name) => return Err(format!("users: {name:?} not found")),
    };
    let url: http::Uri =
        cluster.server.parse().map_err(|error| format!("server {:?}: {error}", cluster.server))?;
    // TLS is required except on loopback: tokens and responses decide on permissions.
    let is_local = matches!(url.host(), Some("127.0.0.1" | "[::1]" | "localhost"));
    if url.scheme_str() != Some("https") && !(is_local && url.scheme_str() == Some("http")) {
        return Err(format!(
            "server {:?}: must be an https URL, or http on the loopback interface",
            cluster.server
        ));
    }
    Ok(Parsed {
        url: cluster.server.clone(),
        credential: credential(user, base)?,
        tls: tls(cluster, user, base)?,
    })
}

fn credential(user: &UserFields, base: &Path) -> Result<Credential, String> {
    match (&user.token, &user.token_file, &user.username) {
        (_, Some(path), None) => Ok(Credential::TokenFile(base.join(path))),
        (Some(token), None, None) => Ok(Credential::Token(token.clone())),
        (None, None, Some(name)) => {
            let password = user.password.as_deref().unwrap_or_default();
            Ok(Credential::Basic(format!("{name}:{password}")))
        }
        (None, None, None) => Ok(Credential::None),
        _ => Err("users: a user has both a token and a user name; remove one of them".to_owned()),
    }
}

fn tls(cluster: &Cluster, user: &UserFields, base: &Path) -> Result<rustls::ClientConfig, String> {
    let (data, path) = (&cluster.certificate_authority_data, &cluster.certificate_authority);
    let mut roots = rustls::RootCertStore::empty();
    match pem("certificate-authority", data, path, base)? {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(|error| format!("certificate-authority: {error}"))?;
                roots.add(certificate).map_err(|error| format!("certificate-authority: {error}"))?;
            }
            if roots.is_empty() {
                return Err("certificate-authority: contains no PEM certificate".to_owned());
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    match client_certificate(user, base)? {
        Some(ClientCertificate { chain, key }) => {
            builder.with_client_auth_cert(chain, key).map_err(|error| format!("client-certificate: {error}"))
        }
        None => Ok(builder.with_no_client_auth()),
    }
}

fn client_certificate(user: &UserFields, base: &Path) -> Result<Option<ClientCertificate>, String> {
    let certificate =
        pem("client-certificate", &user.client_certificate_data, &user.client_certificate, base)?;
    let key = pem("client-key", &user.client_key_data, &user.client_key, base)?;
    match (certificate, key) {
        (Some(certificate), Some(key)) => {
            let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&certificate).collect();
            let chain = chain.map_err(|error| format!("client-certificate: {error}"))?;
            let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| format!("client-key: {error}"))?;
            Ok(Some(ClientCertificate { chain, key }))
        }
        (None, None) => Ok(None),
        _ => Err("client-certificate and client-key must be given together".to_owned()),
    }
}

/// PEM text from a base64 field or from a file. The field takes precedence, as upstream.
fn pem(
    field: &str,
    data: &Option<String>,
    path: &Option<PathBuf>,
    base: &Path,
) -> Result<Option<Vec<u8>>, String> {
    match (data, path) {
        (Some(data), _) => {
            let decoded = BASE64_STANDARD.decode(data.trim());
            decoded.map(Some).map_err(|error| format!("{field}-data: {error}"))
        }
        (None, Some(path)) => read_file(&base.join(path)).map(Some),
        (None, None) => Ok(None),
    }
}

// === impl ClientCertificate ===

impl ClientCertificate {
    /// Copies of the certificates and of the key.
    pub(crate) fn parts(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        (self.chain.clone(), self.key.clone_key())
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    bounded_file::read(path, LIMIT).map_err(|reason| format!("cannot read {}: {reason}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(cluster: &str, user: &str) -> Result<Parsed, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        let text = format!(
            "clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n\
             contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
        );
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn the_current_context_names_server_and_credentials() {
        let parsed = parse("server: 'https://a:1/b'", "token: t").unwrap();
        assert_eq!(
            (parsed.url.as_str(), parsed.credential),
            ("https://a:1/b", Credential::Token("t".into()))
        );
        let basic = parse("server: 'http://127.0.0.1:1'", "username: u, password: p").unwrap();
        assert_eq!(basic.credential, Credential::Basic("u:p".into()));
    }

    #[test]
    fn unsupported_and_invalid_fields_are_named() {
        for (cluster, user, field) in [
            ("server: 'http://a:1'", "", "https"),
            ("server: 'https://a', insecure-skip-tls-verify: true", "", "insecure-skip-tls-verify"),
            ("server: 'https://a'", "exec: {}", "exec"),
            ("server: 'https://a'", "token: a, username: b", "remove one"),
            ("server: 'https://a'", "client-key-data: aaaa", "together"),
            ("server: 'https://a', certificate-authority-data: aaaa", "", "certificate-authority"),
            ("server: 'https://a', certificate-authority: missing", "", "missing"),
        ] {
            let reason = parse(cluster, user).map(|_| ()).unwrap_err();
            assert!(reason.contains(field), "{field}: {reason}");
        }
    }
}
