//! Fully qualified names and paths below domains. Sources: `IsFullyQualifiedName` and `IsDomainPrefixedPath` of
//! `apimachinery/pkg/util/validation`.

use super::{Causes, Path, format};

/// Checks a name that must be a domain with at least three segments.
pub fn check(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        causes.required(path, "");
        return;
    }
    let problems = format::dns1123_subdomain(name);
    if problems.is_empty() && name.split('.').count() < 3 {
        let detail = "should be a domain with at least three segments separated by dots";
        causes.invalid(path, &name.into(), detail);
    }
    causes.format(path, name, problems);
}

/// Checks a domain with a path after it. Source: `IsDomainPrefixedPath`.
pub fn prefixed_path(causes: &mut Causes, path: &Path, name: &str) {
    const RULE: &str = r"Invalid path (regex used for validation is '[A-Za-z0-9/\-._~%!$&'()*+,;=:]+')";
    if name.is_empty() {
        return causes.required(path, "");
    }
    match name.split_once('/') {
        Some((domain, rest)) if !domain.is_empty() && !rest.is_empty() => {
            causes.format(path, domain, format::dns1123_subdomain(domain));
            if !rest.bytes().all(is_path_byte) {
                causes.invalid(path, &rest.into(), RULE);
            }
        }
        _ => {
            let detail = "must be a domain-prefixed path (such as \"acme.io/foo\")";
            causes.invalid(path, &name.into(), detail);
        }
    }
}

fn is_path_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::tests::found;

    #[test]
    fn a_path_follows_a_domain() {
        let problems = |name: &str| found(|causes| prefixed_path(causes, &Path::root("a"), name));
        assert_eq!(problems("a.io/b/c"), Vec::<String>::new());
        for (name, problem) in [
            ("", "a: Required value"),
            ("a.io", "a: Invalid value: \"a.io\": must be a domain-prefixed path"),
            ("/b", "a: Invalid value: \"/b\": must be a domain-prefixed path"),
            ("A/b", "a: Invalid value: \"A\": a lowercase"),
            ("a.io/b c", "a: Invalid value: \"b c\": Invalid path (regex"),
        ] {
            let causes = problems(name);
            assert!(causes.len() == 1 && causes[0].starts_with(problem), "{name}: {causes:?}");
        }
    }
}
