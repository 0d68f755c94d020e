//! The identities of this server at admission webhooks: the users of a kubeconfig file. The name of a user is the
//! address of its webhooks.

use std::{collections::HashMap, path::Path, sync::Arc};

use http::header::HeaderValue;

use super::{
    Credential,
    kubeconfig::{self, ClientCertificate},
};

/// The users of a file. Without a file the server is anonymous.
#[derive(Default)]
pub(crate) struct Identities {
    users: HashMap<String, Arc<Identity>>,
    /// The user of the current context.
    current: Option<Arc<Identity>>,
}

/// The credentials of the server at a webhook.
pub(crate) struct Identity {
    credential: Credential,
    certificate: Option<ClientCertificate>,
}

// === impl Identities ===

impl Identities {
    /// Reads a kubeconfig file.
    ///
    /// # Errors
    /// The file cannot be read, or a user has a field that is not supported.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let (users, current) = kubeconfig::users(path)?;
        let users: HashMap<String, Arc<Identity>> =
            users.into_iter().map(|user| (user.name.clone(), Arc::new(Identity::of(user)))).collect();
        let current = users.get(&current).cloned();
        Ok(Self { users, current })
    }

    /// The identity for the webhook at an address: `host:port`. The name of a user is the address, `*.` with a suffix
    /// of the address, or `*`. The name may omit the default port. If no name matches, the identity is the user of the
    /// current context. Source: `defaultAuthenticationInfoResolver` of `k8s.io/apiserver`.
    pub(crate) fn find(&self, address: &str) -> Option<Arc<Identity>> {
        let named = |name: &str| self.users.get(name).cloned();
        let at = |host: &str| {
            let suffixes = host.match_indices('.').filter_map(|(dot, _)| host.get(dot..));
            named(host).or_else(|| suffixes.map(|suffix| format!("*{suffix}")).find_map(|name| named(&name)))
        };
        let host = address.strip_suffix(":443").map(|host| host.trim_matches(['[', ']']));
        at(address).or_else(|| host.and_then(at)).or_else(|| named("*")).or_else(|| self.current.clone())
    }
}

// === impl Identity ===

impl Identity {
    fn of(user: kubeconfig::User) -> Self {
        Self { credential: user.credential, certificate: user.certificate }
    }

    /// The value of the header `Authorization`.
    ///
    /// # Errors
    /// The token file cannot be read, or the credential is no valid value of a header.
    pub(crate) async fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        self.credential.header().await.map_err(|failure| failure.reason)
    }

    pub(crate) fn certificate(&self) -> Option<&ClientCertificate> {
        self.certificate.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Identities, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config");
        std::fs::write(&path, text).unwrap();
        Identities::read(&path)
    }

    async fn token(identities: &Identities, address: &str) -> Option<String> {
        let identity = identities.find(address)?;
        let value = identity.authorization().await.unwrap()?;
        Some(value.to_str().unwrap().trim_start_matches("Bearer ").to_owned())
    }

    #[tokio::test]
    async fn the_most_specific_user_is_chosen() {
        let user = |name: &str| format!("- {{name: '{name}', user: {{token: '{name}'}}}}\n");
        let names = ["a.n.svc", "a.n.svc:8443", "*.n.svc", "*.svc", "::1", "current"];
        let users: String = names.into_iter().map(user).collect();
        let context = "current-context: x\ncontexts: [{name: x, context: {user: current}}]\n";
        let some = read(&format!("users:\n{users}{context}")).unwrap();
        for (address, name) in [
            ("a.n.svc:443", "a.n.svc"),
            ("a.n.svc:8443", "a.n.svc:8443"),
            ("b.n.svc:443", "*.n.svc"),
            ("b.m.svc:443", "*.svc"),
            ("b.n.svc:8443", "current"),
            ("[::1]:443", "::1"),
            ("svc:443", "current"),
        ] {
            assert_eq!(token(&some, address).await.as_deref(), Some(name), "{address}");
        }
        let all = read(&format!("users:\n{}{}", user("*"), user("a.n.svc"))).unwrap();
        assert_eq!(token(&all, "other:1").await.as_deref(), Some("*"));
        assert!(Identities::default().find("other:1").is_none());
        assert!(read("users: []").unwrap().find("other:1").is_none());
    }

    #[test]
    fn a_user_that_cannot_be_used_is_named() {
        for (user, field) in [
            ("{exec: {}}", "exec"),
            ("{token: a, username: b}", "\"u\": "),
            ("{client-key-data: aaaa}", "together"),
            ("{client-certificate: missing, client-key: missing}", "cannot read"),
        ] {
            let why = read(&format!("users: [{{name: u, user: {user}}}]")).map(|_| ()).unwrap_err();
            assert!(why.contains(field), "{user}: {why}");
        }
    }
}
