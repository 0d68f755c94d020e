//! Basic authentication: a file with CSV records of `password,user,uid[,"group1,group2"]`.
//!
//! Source: `passwordfile` and `basicauth` of `k8s.io/apiserver` up to v1.18.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use ring::{hmac, rand::SystemRandom};

use super::{Authenticating, Authenticator, Credential, User, credential_file, known};

/// Users by the digest of `user:password`. Clients cannot predict the digests, because the key is random. The duration
/// of a look-up therefore reveals neither passwords nor user names.
pub(super) struct PasswordFile {
    key: hmac::Key,
    users: HashMap<Box<[u8]>, User>,
}

/// A record of the file.
struct Account {
    password: String,
    user: User,
}

// === impl PasswordFile ===

impl PasswordFile {
    /// Reads the file.
    ///
    /// # Errors
    /// The file cannot be read, or a record is invalid. The error text contains no password.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let text = credential_file::read(path).map_err(|error| error.to_string())?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let key = key.map_err(|_unspecified| "the system has no random bytes".to_owned())?;
        let mut accounts = BTreeMap::new();
        let mut reader = csv::ReaderBuilder::new();
        let mut reader = reader.has_headers(false).flexible(true).from_reader(text.as_bytes());
        for record in reader.records() {
            let record = record.map_err(|error| error.to_string())?;
            let line = record.position().map_or(0, csv::Position::line);
            let account = account(&record).map_err(|reason| format!("line {line}: {reason}"))?;
            let name = account.user.name.clone();
            // As upstream, the last record of a user is used.
            if accounts.insert(name.clone(), account).is_some() {
                tracing::warn!(
                    user = name,
                    line,
                    "a user of the password file has several records; the last one is used"
                );
            }
        }
        let users = accounts.into_iter().map(|(name, Account { password, user })| {
            let tag = hmac::sign(&key, format!("{name}:{password}").as_bytes());
            (tag.as_ref().into(), user)
        });
        Ok(Self { users: users.collect(), key })
    }

    /// The user of `user:password`.
    fn user(&self, credential: &[u8]) -> Option<User> {
        self.users.get(hmac::sign(&self.key, credential).as_ref()).cloned()
    }
}

impl Authenticator for PasswordFile {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        known(credential.password.and_then(|password| self.user(password)))
    }
}

fn account(record: &csv::StringRecord) -> Result<Account, &'static str> {
    let mut fields = record.iter();
    let (Some(password), Some(name), Some(uid), groups, None) =
        (fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
    else {
        return Err("a record must have the form password,user,uid[,\"group1,group2\"]");
    };
    if password.is_empty() || name.is_empty() {
        return Err("the password and the user must not be empty");
    }
    // The name in the header ends at the first colon (RFC 7617).
    if name.contains(':') {
        return Err("the user must not contain a colon");
    }
    let groups = groups.unwrap_or_default().split(',').map(str::trim).filter(|group| !group.is_empty());
    let mut user = User::new(name, &groups.collect::<Vec<_>>());
    uid.clone_into(&mut user.uid);
    Ok(Account { password: password.to_owned(), user })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_name_users_and_groups() {
        let text = "s3cret,ann,7,\"dev,ops\"\n\n\"a,\"\"b:c\",bob,8\n# x,eve,9\n";
        let file = PasswordFile::parse(text).unwrap();
        let ann = file.user(b"ann:s3cret").unwrap();
        assert_eq!((ann.name.as_str(), ann.uid.as_str()), ("ann", "7"));
        assert_eq!(ann.groups, ["dev", "ops", "system:authenticated"]);
        assert_eq!(file.user(b"bob:a,\"b:c").unwrap().groups, ["system:authenticated"]);
        // As upstream, the file has no comments.
        assert_eq!(file.user(b"eve:# x").unwrap().uid, "9");
        for wrong in ["ann:other", "ann:", "ann", "", ":s3cret", "bob:s3cret", "other:s3cret", "ann:s3cret "]
        {
            assert_eq!(file.user(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn the_last_record_of_a_user_counts() {
        let file = PasswordFile::parse("old,ann,1,system:masters\nnew,ann,2\n").unwrap();
        assert_eq!(file.user(b"ann:old"), None);
        assert_eq!(file.user(b"ann:new").unwrap().groups, ["system:authenticated"]);
    }

    #[test]
    fn an_invalid_record_is_refused_with_its_line_and_without_its_password() {
        for (text, reason) in [
            ("pw0,a,1\npw1,b\n", "line 2: a record must have the form"),
            ("pw1,a,1,dev,ops\n", "line 1: a record must have the form"),
            (",a,1\n", "line 1: the password"),
            ("pw1,,1\n", "line 1: the password"),
            ("pw1,a:b,1\n", "line 1: the user"),
        ] {
            let found = PasswordFile::parse(text).err().unwrap();
            assert!(found.starts_with(reason) && !found.contains("pw1"), "{found}");
        }
    }
}
