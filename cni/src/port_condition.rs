//! Conditions of portmap (`conditionsV4`, `conditionsV6`) in the syntax of iptables or nft. They compare source,
//! destination and incoming interface of packets; any other word is refused, and the error names it.

use std::iter::Peekable;

use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::spec::is_interface_name;

/// Subject of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Subject {
    /// The packet's source is in this network.
    From(IpNetwork),
    /// The packet's destination is in this network, before translation.
    To(IpNetwork),
    /// The packet came in through the interface with this name.
    By(String),
    /// The packet came in through an interface whose name has this prefix.
    ByAny(String),
}

/// One condition. All conditions of a port must hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Condition {
    pub(crate) subject: Subject,
    /// Inverts the comparison.
    pub(crate) negated: bool,
}

/// Kind of the value that follows a word.
#[derive(Clone, Copy)]
enum Field {
    From,
    To,
    By,
}

/// Parses the conditions of a configuration field, for one family.
pub(crate) fn parse(name: &str, parts: &[String], v4: bool) -> Result<Vec<Condition>, Error> {
    let mut words = parts.iter().flat_map(|part| part.split_whitespace()).peekable();
    let mut conditions = Vec::new();
    while let Some(word) = words.next() {
        conditions.push(parse_one(name, word, &mut words, v4)?);
    }
    Ok(conditions)
}

fn parse_one<'w>(
    name: &str,
    word: &'w str,
    words: &mut Peekable<impl Iterator<Item = &'w str>>,
    v4: bool,
) -> Result<Condition, Error> {
    let unsupported = |word: &str| Error::unsupported(name, &word.into());
    let ends = || Error::invalid(name, "ends in the middle of a condition");
    let (before, word) = match word {
        "!" => (true, words.next().ok_or_else(ends)?),
        word => (false, word),
    };
    let family = if v4 { "ip" } else { "ip6" };
    let field = match word {
        "-s" | "--src" | "--source" => Field::From,
        "-d" | "--dst" | "--destination" => Field::To,
        "-i" | "--in-interface" | "iifname" => Field::By,
        word if word == family && !before => match words.next().ok_or_else(ends)? {
            "saddr" => Field::From,
            "daddr" => Field::To,
            other => return Err(unsupported(other)),
        },
        other => return Err(unsupported(other)),
    };
    let after = words.next_if(|word| ["!=", "=="].contains(word)) == Some("!=");
    let value = words.next().ok_or_else(ends)?;
    let subject = subject(field, value, v4)
        .ok_or_else(|| Error::invalid(name, format!("{value:?} is not a valid value")))?;
    Ok(Condition { subject, negated: before || after })
}

fn subject(field: Field, value: &str, v4: bool) -> Option<Subject> {
    let network = || {
        let network: IpNetwork = value.parse().ok()?;
        let network = IpNetwork::new(network.network(), network.prefix()).ok()?;
        (network.is_ipv4() == v4).then_some(network)
    };
    match field {
        Field::From => network().map(Subject::From),
        Field::To => network().map(Subject::To),
        Field::By => {
            let named = value.trim_matches('"');
            match named.strip_suffix(['+', '*']) {
                Some(head) => (1..16).contains(&head.len()).then(|| Subject::ByAny(head.to_owned())),
                None => is_interface_name(named).then(|| Subject::By(named.to_owned())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&str], v4: bool) -> Result<Vec<Condition>, Error> {
        parse("conditionsV4", &parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>(), v4)
    }

    #[test]
    fn conditions_are_read_in_the_syntax_of_iptables_and_of_nft() {
        let net = || "192.0.2.0/24".parse().unwrap();
        let expected = [
            Condition { subject: Subject::To(net()), negated: true },
            Condition { subject: Subject::From("10.0.0.1/32".parse().unwrap()), negated: false },
            Condition { subject: Subject::By("eth0".into()), negated: false },
            Condition { subject: Subject::ByAny("wg".into()), negated: true },
        ];
        let iptables = ["!", "-d", "192.0.2.7/24", "-s", "10.0.0.1", "-i", "eth0", "! -i wg+"];
        assert_eq!(read(&iptables, true).unwrap(), expected);
        let nft = ["ip daddr != 192.0.2.0/24", "ip", "saddr", "10.0.0.1", "iifname \"eth0\" iifname != wg*"];
        assert_eq!(read(&nft, true).unwrap(), expected);
        assert!(read(&["ip6 saddr fd00::/8"], false).is_ok() && read(&[], true).unwrap().is_empty());
    }

    #[test]
    fn unknown_words_are_refused_by_name() {
        for (parts, code, said) in [
            (&["-m", "comment"][..], 2, "-m"),
            (&["!"], 7, "middle"),
            (&["-d"], 7, "middle"),
            (&["ip protocol tcp"], 2, "protocol"),
            (&["ip6 saddr fd00::/8"], 2, "ip6"),
            (&["-d", "fd00::/8"], 7, "fd00::/8"),
            (&["-s", "nowhere"], 7, "nowhere"),
            (&["-i", "a/b"], 7, "a/b"),
            (&["-i", "+"], 7, "+"),
            (&["ip saddr {10.0.0.1, 10.0.0.2}"], 7, "{10.0.0.1,"),
        ] {
            let error = read(parts, true).unwrap_err();
            assert!(error.code() == code && error.to_string().contains(said), "{parts:?}: {error}");
        }
    }
}
