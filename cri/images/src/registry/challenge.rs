//! Parses `WWW-Authenticate`: the scheme and the token service that a registry requires.

/// An authentication challenge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User name and password with every request.
    Basic,
    /// A token of this service.
    Bearer { realm: String, service: String, scope: String },
}

/// The strongest supported challenge in the header's values.
pub(crate) fn parse<'a>(values: impl IntoIterator<Item = &'a str>) -> Option<Challenge> {
    let mut found = None;
    for value in values {
        for (scheme, parameters) in split(value) {
            let get = |name: &str| {
                let found = parameters.iter().find(|(key, _)| key == name);
                found.map(|(_, value)| value.clone()).unwrap_or_default()
            };
            match scheme.as_str() {
                "bearer" if !get("realm").is_empty() => {
                    return Some(Challenge::Bearer {
                        realm: get("realm"),
                        service: get("service"),
                        scope: get("scope"),
                    });
                }
                "basic" => found = Some(Challenge::Basic),
                _ => {}
            }
        }
    }
    found
}

type Parameters = Vec<(String, String)>;

/// Splits `Scheme a=b, c="d, e", Other f=g` into schemes with their parameters.
fn split(value: &str) -> Vec<(String, Parameters)> {
    let mut challenges: Vec<(String, Parameters)> = Vec::new();
    let mut rest = value.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c == ',' || c.is_whitespace()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let trimmed = after.trim_start();
        if let Some(assigned) = trimmed.strip_prefix('=') {
            let (text, after) = parameter(assigned.trim_start());
            if let Some((_, parameters)) = challenges.last_mut() {
                parameters.push((word.to_ascii_lowercase(), text));
            }
            rest = after;
        } else {
            if !word.is_empty() {
                challenges.push((word.to_ascii_lowercase(), Vec::new()));
            }
            rest = trimmed;
        }
        rest = rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
    }
    challenges
}

/// Parses a token or a quoted string. Returns the value and the rest.
fn parameter(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c: char| c == ',' || c.is_whitespace()).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::{Challenge, parse};

    #[test]
    fn challenges_of_real_registries_are_parsed() {
        let bearer = |realm: &str, service: &str, scope: &str| {
            Some(Challenge::Bearer { realm: realm.into(), service: service.into(), scope: scope.into() })
        };
        let cases: &[(&[&str], Option<Challenge>)] = &[
            (
                &[
                    r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/nginx:pull""#,
                ],
                bearer("https://auth.docker.io/token", "registry.docker.io", "repository:library/nginx:pull"),
            ),
            (&[r#"Basic realm="Registry Realm""#], Some(Challenge::Basic)),
            (&["Basic"], Some(Challenge::Basic)),
            (
                &[r#"bearer  realm = "a" , scope="repository:a:pull,push""#],
                bearer("a", "", "repository:a:pull,push"),
            ),
            (&[r#"Basic realm="x", Bearer realm="y",service=z"#], bearer("y", "z", "")),
            (&[r#"Basic realm="x""#, r#"Bearer realm="y""#], bearer("y", "", "")),
            (&[r#"Bearer realm="a\"b""#], bearer("a\"b", "", "")),
            (&["Negotiate"], None),
            (&["Bearer"], None),
            (&[r#"Bearer realm="unterminated"#], bearer("unterminated", "", "")),
            (&["", ",,=,= \"", "=a"], None),
        ];
        for (values, expected) in cases {
            assert_eq!(&parse(values.iter().copied()), expected, "{values:?}");
        }
    }
}
