//! The static token file: lines of `token,user,uid[,"group1,group2"]`.

use std::{collections::HashMap, path::Path};

use sha2::{Digest as _, Sha256};

use super::{Authenticating, Authenticator, Credential, User, credential_file, known};

/// Users by the digest of their token. The duration of a look-up therefore reveals nothing about tokens.
pub(crate) struct TokenFile {
    users: HashMap<[u8; 32], User>,
}

impl TokenFile {
    pub(crate) fn read(path: &Path) -> std::io::Result<Self> {
        Self::parse(&credential_file::read(path)?).map_err(std::io::Error::other)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).enumerate();
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let users = lines.map(|(index, line)| {
            let parts: Vec<&str> = line.splitn(4, ',').map(str::trim).collect();
            let (token, name, uid) = match parts[..] {
                [token, name, uid, ..] if !token.is_empty() && !name.is_empty() => (token, name, uid),
                _ => {
                    return Err(format!(
                        "line {} must have the form token,user,uid[,\"group1,group2\"]",
                        index + 1
                    ));
                }
            };
            let groups = parts.get(3).copied().unwrap_or_default().trim_matches('"');
            let groups: Vec<&str> =
                groups.split(',').map(str::trim).filter(|group| !group.is_empty()).collect();
            let mut user = User::new(name, &groups);
            uid.clone_into(&mut user.uid);
            Ok((digest(token), user))
        });
        Ok(Self { users: users.collect::<Result<_, String>>()? })
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
        let file = TokenFile::parse("# comment\nsecret,ann,7,\"dev,ops\"\nother,bob,8\n\n").unwrap();
        let ann = file.user("secret").unwrap();
        assert_eq!((ann.name.as_str(), ann.uid.as_str()), ("ann", "7"));
        assert_eq!(ann.groups, ["dev", "ops", "system:authenticated"]);
        assert_eq!(file.user("other").unwrap().groups, ["system:authenticated"]);
        assert_eq!(file.user("wrong"), None);
        assert!(TokenFile::parse("a,b,c\nbroken\n").err().unwrap().contains("line 2"));
        assert!(TokenFile::parse(",b,c\n").is_err());
    }
}
