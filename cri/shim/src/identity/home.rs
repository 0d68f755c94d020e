//! A user's home, from the container's own /etc/passwd.

use std::io::{BufRead as _, BufReader, Read as _};

/// An image's file is untrusted: no more of it is read.
const LARGEST: u64 = 1 << 20;

pub(super) fn of(uid: u32) -> String {
    let found = std::fs::File::open("/etc/passwd").ok().and_then(|file| {
        let lines = BufReader::new(file.take(LARGEST)).lines().map_while(Result::ok);
        lines.filter_map(|line| home_in(&line, uid)).next()
    });
    found.unwrap_or_else(|| "/".to_owned())
}

fn home_in(line: &str, uid: u32) -> Option<String> {
    let mut fields = line.split(':').skip(2);
    let id: u32 = fields.next()?.parse().ok()?;
    let home = fields.nth(2)?;
    (id == uid && home.starts_with('/')).then(|| home.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_is_the_sixth_field_of_the_users_line() {
        assert_eq!(home_in("www:x:33:33:www:/var/www:/bin/sh", 33).as_deref(), Some("/var/www"));
        assert_eq!(home_in("www:x:33:33:www:/var/www:/bin/sh", 0), None);
        assert_eq!(home_in("broken", 0), None);
    }
}
