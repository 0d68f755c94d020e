//! `resolvConf`: resolver settings from a file in the format of resolv.conf(5).

use std::path::Path;

use crate::error::Error;
use crate::spec::result::Dns;

pub(crate) fn read(path: &Path) -> Result<Dns, Error> {
    let failed = |source| Error::File { action: "read", path: path.to_owned(), source };
    Ok(parse(&std::fs::read_to_string(path).map_err(failed)?))
}

fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        let mut words = line.split_whitespace();
        let (keyword, mut rest) = (words.next(), words.map(str::to_owned));
        match keyword {
            Some("nameserver") => dns.nameservers.extend(rest.next()),
            Some("domain") => dns.domain = rest.next().unwrap_or_default(),
            Some("search") => dns.search.extend(rest),
            Some("options") => dns.options.extend(rest),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolver_settings_are_read_as_by_the_c_library() {
        let dns =
            parse("# c\nnameserver 10.0.0.1\nnameserver ::1\ndomain a.b\nsearch c.d e.f\noptions ndots:5\n");
        assert_eq!(dns.nameservers, ["10.0.0.1", "::1"]);
        assert_eq!((dns.domain.as_str(), dns.search.len(), dns.options.len()), ("a.b", 2, 1));
    }
}
