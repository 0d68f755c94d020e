//! The static token file: lines of `token,user,uid[,"group1,group2"]`.

use std::{collections::HashMap, path::Path};

use sha2::{Digest as _, Sha256};

use super::{Authenticating, Authenticator, Credential, User, known};

/// Users by the digest of their token, so that the duration of a look-up does not depend on the token.
pub(crate) struct TokenFile {
    users: HashMap<[u8; 32], User>,
}

impl TokenFile {
    pub(crate) fn read(path: &Path) -> std::io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string(path)?))
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let users = lines.filter_map(|line| {
            let mut parts = line.splitn(4, ',').map(str::trim);
            let (token, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
            let groups = parts.next().unwrap_or_default().trim_matches('"');
            let groups: Vec<&str> =
                groups.split(',').map(str::trim).filter(|group| !group.is_empty()).collect();
            let mut user = User::new(name, &groups);
            uid.clone_into(&mut user.uid);
            Some((digest(token), user))
        });
        Self { users: users.collect() }
    }

    pub(crate) fn user(&self, token: &str) -> Option<User> {
        self.users.get(&digest(token)).cloned()
    }
}

impl Authenticator for TokenFile {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        known(credential.token.and_then(|token| self.user(token)))
    }
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_users_and_groups() {
        let file = TokenFile::parse("# comment\nsecret,ann,7,\"dev,ops\"\nother,bob,8\n\nbroken\n");
        let ann = file.user("secret").unwrap();
        assert_eq!((ann.name.as_str(), ann.uid.as_str()), ("ann", "7"));
        assert_eq!(ann.groups, ["dev", "ops", "system:authenticated"]);
        assert_eq!(file.user("other").unwrap().groups, ["system:authenticated"]);
        assert_eq!(file.user("wrong"), None);
    }
}
