//! Image references, parsed and normalised as in the distribution project: `nginx` becomes
//! `docker.io/library/nginx:latest`.

use std::fmt;

use crate::digest::Digest;

/// Maximum length of a repository name without domain, tag and digest (distribution's limit).
const NAME_MAX: usize = 255;
const DEFAULT_DOMAIN: &str = "docker.io";
const LEGACY_DOMAIN: &str = "index.docker.io";

/// A normalised reference: a repository and a tag or digest. If a reference has both, only the digest is
/// kept, because it determines the content.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    domain: String,
    path: String,
    target: Target,
}

/// Tag or digest of a reference.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A tag, which can be moved to another image.
    Tag(String),
    /// A digest, `sha256:…` or `sha512:…`.
    Digest(String),
}

/// Error of a string that is not an image reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid image reference {reference:?}: {reason}")]
pub struct InvalidReference {
    /// The string.
    pub reference: String,
    /// The reason.
    pub reason: &'static str,
}

// === impl Reference ===

impl Reference {
    /// Parses and normalises a reference.
    ///
    /// # Errors
    /// If it is not a valid reference.
    pub fn parse(text: &str) -> Result<Reference, InvalidReference> {
        parse(text).map_err(|reason| InvalidReference { reference: text.to_owned(), reason })
    }

    /// The registry's host, with its port if one is given.
    #[must_use]
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// The repository within the registry, such as `library/nginx`.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The tag or digest.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Registry and repository, such as `docker.io/library/nginx`.
    #[must_use]
    pub fn repository(&self) -> String {
        format!("{}/{}", self.domain, self.path)
    }
}

impl Target {
    /// The tag or digest as in a manifest's URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Target::Tag(tag) => tag,
            Target::Digest(digest) => digest,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.target {
            Target::Tag(_) => ':',
            Target::Digest(_) => '@',
        };
        write!(f, "{}/{}{mark}{}", self.domain, self.path, self.target.as_str())
    }
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    if text.is_empty() {
        return Err("it is empty");
    }
    if text.len() == 64 && text.bytes().all(is_lower_hex) {
        return Err("it is an image id, not a name");
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(check_digest(digest)?)),
        None => (text, None),
    };
    // A colon after the last slash starts the tag. An earlier colon starts a port.
    let tail = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match rest[tail..].find(':') {
        Some(colon) => (&rest[..tail + colon], Some(check_tag(&rest[tail + colon + 1..])?)),
        None => (rest, None),
    };
    let (domain, path) = split_domain(name);
    check_domain(domain)?;
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("the repository name must be lower case");
    }
    if !path.split('/').all(is_path_component) {
        return Err("the repository name has invalid characters or separators");
    }
    let (domain, path) = normalise(domain, path);
    if path.len() > NAME_MAX {
        return Err("the repository name is longer than 255 characters");
    }
    let target = match (digest, tag) {
        (Some(digest), _) => Target::Digest(digest.to_owned()),
        (None, tag) => Target::Tag(tag.unwrap_or("latest").to_owned()),
    };
    Ok(Reference { domain, path, target })
}

/// Splits off the domain: the part before the first slash, if it contains a dot, a port or upper case, or is
/// `localhost`.
fn split_domain(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some((first, rest))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            (first, rest)
        }
        _ => (DEFAULT_DOMAIN, name),
    }
}

fn normalise(domain: &str, path: &str) -> (String, String) {
    let domain = if domain == LEGACY_DOMAIN { DEFAULT_DOMAIN } else { domain };
    let path = if domain == DEFAULT_DOMAIN && !path.contains('/') {
        format!("library/{path}")
    } else {
        path.to_owned()
    };
    (domain.to_owned(), path)
}

fn check_domain(domain: &str) -> Result<(), &'static str> {
    const WRONG: &str = "the registry's host name is invalid";
    let (host, port) = match domain.strip_prefix('[') {
        Some(v6) => {
            let (address, after) = v6.split_once(']').ok_or(WRONG)?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_not_an_address| WRONG)?;
            (None, after.strip_prefix(':').map(Some).or(after.is_empty().then_some(None)).ok_or(WRONG)?)
        }
        None => match domain.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(domain), None),
        },
    };
    let host_ok = host.is_none_or(|host| host.split('.').all(is_domain_label));
    let port_ok = port.is_none_or(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()));
    if host_ok && port_ok { Ok(()) } else { Err(WRONG) }
}

fn is_domain_label(label: &str) -> bool {
    !label.is_empty()
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// `alphanumerics ( ( "." | "_" | "__" | "-"+ ) alphanumerics )*`, lower case.
fn is_path_component(component: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = component.as_bytes();
    let ends_ok = bytes.first().is_some_and(|b| word(*b)) && bytes.last().is_some_and(|b| word(*b));
    ends_ok
        && bytes.split(|b| word(*b)).all(|separator| {
            matches!(separator, b"" | b"." | b"_" | b"__") || separator.iter().all(|b| *b == b'-')
        })
}

fn check_tag(tag: &str) -> Result<&str, &'static str> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let first_ok = tag.bytes().next().is_some_and(word);
    if first_ok && tag.len() <= 128 && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-') {
        Ok(tag)
    } else {
        Err("the tag is invalid")
    }
}

fn check_digest(digest: &str) -> Result<&str, &'static str> {
    match digest.split_once(':') {
        _ if digest.parse::<Digest>().is_ok() => Ok(digest),
        Some(("sha384" | "blake3", _)) => Err("only sha256 and sha512 digests are supported"),
        _ => Err("the digest is invalid"),
    }
}

fn is_lower_hex(byte: u8) -> bool {
    byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::Reference;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn references_are_normalised() {
        let digest = format!("@sha256:{HEX}");
        for (given, expected) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("nginx:1.27", "docker.io/library/nginx:1.27"),
            ("library/nginx", "docker.io/library/nginx:latest"),
            ("bitnami/nginx", "docker.io/bitnami/nginx:latest"),
            ("docker.io/nginx", "docker.io/library/nginx:latest"),
            ("index.docker.io/nginx", "docker.io/library/nginx:latest"),
            ("localhost/nginx", "localhost/nginx:latest"),
            ("localhost:5000/nginx:a", "localhost:5000/nginx:a"),
            ("127.0.0.1:5000/a/b/c", "127.0.0.1:5000/a/b/c:latest"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
            ("[::1]/a", "[::1]/a:latest"),
            ("registry.k8s.io/pause:3.9", "registry.k8s.io/pause:3.9"),
            ("UPPER/nginx", "UPPER/nginx:latest"),
            ("foo_bar", "docker.io/library/foo_bar:latest"),
            ("foo__bar--baz.x", "docker.io/library/foo__bar--baz.x:latest"),
            ("xn--7o8h.com/a:_T.g-1", "xn--7o8h.com/a:_T.g-1"),
        ] {
            assert_eq!(Reference::parse(given).map(|r| r.to_string()), Ok(expected.to_owned()), "{given}");
        }
        for digest in [digest, format!("@sha512:{HEX}{HEX}")] {
            for (given, expected) in [("nginx", "docker.io/library/nginx"), ("a.b/c:tag", "a.b/c")] {
                let parsed = Reference::parse(&format!("{given}{digest}")).map(|r| r.to_string());
                assert_eq!(parsed, Ok(format!("{expected}{digest}")));
            }
        }
    }

    #[test]
    fn invalid_references_are_refused() {
        let long = format!("docker.io/{}", "a".repeat(256));
        for given in [
            "",
            ":",
            "nginx:",
            "nginx@",
            "nginx@sha256:abc",
            &format!("nginx@sha512:{HEX}"),
            &format!("nginx@sha384:{HEX}"),
            "nginx@md5:abc",
            "Nginx",
            "a.b/Nginx",
            "a//b",
            "/a",
            "a/",
            "a b",
            "nginx:a b",
            "-nginx",
            "nginx-",
            "a___b",
            "a..b",
            "a.b:port/x",
            "-a.b/x",
            "a.b:/x",
            "[::1/x",
            "[zz]:1/x",
            "https://a.b/c",
            "nginx:.tag",
            HEX,
            &long,
            "a@b@c",
            "näme",
        ] {
            assert!(Reference::parse(given).is_err(), "{given:?} was accepted");
        }
        assert!(Reference::parse(&format!("nginx:{}", "t".repeat(129))).is_err());
    }
}
