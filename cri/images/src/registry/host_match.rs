//! Whether an address belongs to a registry's name. This decides which hosts get credentials, and which are
//! mirrors.

use reqwest::Url;

/// Names of Docker Hub, the only registry whose address differs from the names of its images.
const HUB: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// Whether requests to this base URL go to the host and port of a name. Without a port the name means the
/// scheme's default port.
pub(super) fn is_address_of(base: &str, name: &str) -> bool {
    let Ok(url) = base.parse::<Url>() else { return false };
    let Ok(named) = format!("{}://{name}", url.scheme()).parse::<Url>() else { return false };
    let same_host = url.host_str() == named.host_str() || [&url, &named].into_iter().all(is_hub);
    same_host && url.port_or_known_default() == named.port_or_known_default()
}

/// The host of an address in credentials: `https://index.docker.io/v1/`, `r.example:5000`.
pub(super) fn host_of(address: &str) -> &str {
    let bare = address.split_once("://").map_or(address, |(_scheme, rest)| rest);
    bare.split('/').next().unwrap_or_default()
}

fn is_hub(url: &Url) -> bool {
    url.host_str().is_some_and(|host| HUB.contains(&host))
}

#[cfg(test)]
mod tests {
    use super::{host_of, is_address_of};

    #[test]
    fn addresses_match_names_by_host_and_port() {
        for (base, name, expected) in [
            ("https://r.example/v2", "r.example", true),
            ("http://r.example/v2", "r.example", true),
            ("https://R.example:443/some/path", "r.example", true),
            ("https://r.example/v2", "r.example:443", true),
            ("https://r.example:5000/v2", "r.example:5000", true),
            ("http://[::1]:5000/v2", "[::1]:5000", true),
            ("https://registry-1.docker.io/v2", "docker.io", true),
            ("https://r.example:5000/v2", "r.example", false),
            ("https://r.example/v2", "r.example:5000", false),
            ("https://mirror.r.example/v2", "r.example", false),
            ("https://r.example.evil/v2", "r.example", false),
            ("https://r.example@evil/v2", "r.example", false),
            ("https://evil/r.example/v2", "r.example", false),
            ("https://registry-1.docker.io/v2", "r.example", false),
            ("https://evil/v2", "", false),
        ] {
            assert_eq!(is_address_of(base, name), expected, "{base} {name}");
        }
    }

    #[test]
    fn only_the_host_of_a_credentials_address_is_used() {
        assert_eq!(host_of("https://index.docker.io/v1/"), "index.docker.io");
        assert_eq!(host_of("r.example:5000"), "r.example:5000");
        assert_eq!(host_of(""), "");
    }
}
