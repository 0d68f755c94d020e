//! The providers: each has a prefix for its values, and keys.
//!
//! Source of the formats: `k8s.io/apiserver/pkg/storage/value/encrypt`.

use aes::cipher::{BlockDecryptMut as _, BlockEncryptMut as _, KeyIvInit as _, block_padding::Pkcs7};
use crypto_secretbox::{
    KeyInit as _, XSalsa20Poly1305,
    aead::{Aead as _, generic_array::GenericArray},
};
use ring::aead::LessSafeKey;

use super::gcm::{self, Aes192Gcm, random};
use super::kms::Kms;
use coracle_sealing::Error;

const CBC_BLOCK_BYTES: usize = 16;
const SECRETBOX_NONCE_BYTES: usize = 24;

/// One provider.
pub(super) enum Provider {
    /// Values are stored as they are.
    Identity,
    /// Keys from the file. The first key encrypts; all keys decrypt.
    Keys(Scheme, Vec<NamedKey>),
    Kms(Kms),
}

/// A cipher with keys from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    AesCbc,
    AesGcm,
    Secretbox,
}

/// A key.
pub(super) struct NamedKey {
    pub(super) name: String,
    key: Key,
}

enum Key {
    /// AES-GCM with a key of 16 or 32 bytes.
    Gcm(Box<LessSafeKey>),
    /// AES-GCM with a key of 24 bytes.
    Gcm192(Box<Aes192Gcm>),
    /// AES-CBC with a key of 16, 24 or 32 bytes.
    Cbc(Vec<u8>),
    Secretbox(Box<XSalsa20Poly1305>),
}

// === impl Provider ===

impl Provider {
    /// The key management service of the provider, if it has one.
    pub(super) fn service(&self) -> Option<&Kms> {
        match self {
            Self::Kms(kms) => Some(kms),
            Self::Identity | Self::Keys(..) => None,
        }
    }

    /// Encrypts the value and adds the prefix. `None` if the value is stored without encryption.
    pub(super) fn seal(&self, plain: &[u8], context: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        match self {
            Self::Identity => Ok(None),
            Self::Keys(scheme, keys) => {
                let key = keys.first().ok_or(Error::Cipher)?;
                let mut sealed = scheme.prefix(&key.name);
                sealed.extend(key.key.seal(plain, context)?);
                Ok(Some(sealed))
            }
            Self::Kms(kms) => kms.seal(plain, context).map(Some),
        }
    }

    /// Decrypts the value. `None` if it does not have the prefix of this provider.
    pub(super) fn open(&self, stored: &[u8], context: &[u8]) -> Option<Result<Vec<u8>, Error>> {
        match self {
            Self::Identity => None,
            Self::Keys(scheme, keys) => keys.iter().find_map(|key| {
                let sealed = stored.strip_prefix(scheme.prefix(&key.name).as_slice())?;
                let damaged = || Error::Damaged { id: key.name.clone() };
                Some(key.key.open(sealed, context).ok_or_else(damaged))
            }),
            Self::Kms(kms) => stored.strip_prefix(kms.prefix()).map(|sealed| kms.open(sealed, context)),
        }
    }

    /// Whether this provider would write the value with the same prefix and key now.
    pub(super) fn is_current(&self, stored: &[u8]) -> bool {
        match self {
            Self::Identity => !super::is_encrypted(stored),
            Self::Keys(scheme, keys) => {
                keys.first().is_some_and(|key| stored.starts_with(&scheme.prefix(&key.name)))
            }
            Self::Kms(kms) => stored.strip_prefix(kms.prefix()).is_some_and(|sealed| kms.is_current(sealed)),
        }
    }
}

// === impl Scheme ===

impl Scheme {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AesCbc => "aescbc",
            Self::AesGcm => "aesgcm",
            Self::Secretbox => "secretbox",
        }
    }

    fn prefix(self, key: &str) -> Vec<u8> {
        format!("k8s:enc:{}:v1:{key}:", self.name()).into_bytes()
    }

    /// A key of this cipher.
    ///
    /// # Errors
    /// The number of its bytes is wrong.
    pub(super) fn key(self, name: String, bytes: &[u8]) -> Result<NamedKey, String> {
        let key = match (self, bytes.len()) {
            (Self::AesGcm, 16 | 32) => {
                gcm::key(bytes).map(|key| Key::Gcm(Box::new(key))).ok_or("the key cannot be used")?
            }
            (Self::AesGcm, 24) => {
                gcm::key_192(bytes).map(|key| Key::Gcm192(Box::new(key))).ok_or("the key cannot be used")?
            }
            (Self::AesGcm, _) => return Err("an aesgcm key must have 16, 24 or 32 bytes".to_owned()),
            (Self::AesCbc, 16 | 24 | 32) => Key::Cbc(bytes.to_vec()),
            (Self::AesCbc, _) => return Err("an aescbc key must have 16, 24 or 32 bytes".to_owned()),
            (Self::Secretbox, 32) => {
                let cipher = XSalsa20Poly1305::new_from_slice(bytes).map_err(|error| error.to_string())?;
                Key::Secretbox(Box::new(cipher))
            }
            (Self::Secretbox, _) => return Err("a secretbox key must have 32 bytes".to_owned()),
        };
        Ok(NamedKey { name, key })
    }
}

// === impl Key ===

impl Key {
    fn seal(&self, plain: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        match self {
            Self::Gcm(key) => gcm::seal(key, plain, context),
            Self::Gcm192(key) => gcm::seal_192(key, plain, context),
            Self::Cbc(key) => {
                let iv: [u8; CBC_BLOCK_BYTES] = random()?;
                let mut sealed = iv.to_vec();
                sealed.extend(encrypt_cbc(key, &iv, plain).ok_or(Error::Cipher)?);
                Ok(sealed)
            }
            Self::Secretbox(cipher) => {
                let nonce: [u8; SECRETBOX_NONCE_BYTES] = random()?;
                let text = cipher.encrypt(GenericArray::from_slice(&nonce), plain);
                let mut sealed = nonce.to_vec();
                sealed.extend(text.map_err(|_failed| Error::Cipher)?);
                Ok(sealed)
            }
        }
    }

    fn open(&self, sealed: &[u8], context: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Gcm(key) => gcm::open(key, sealed, context),
            Self::Gcm192(key) => gcm::open_192(key, sealed, context),
            Self::Cbc(key) => {
                let (iv, text) = sealed.split_first_chunk::<CBC_BLOCK_BYTES>()?;
                decrypt_cbc(key, iv, text)
            }
            Self::Secretbox(cipher) => {
                let (nonce, text) = sealed.split_first_chunk::<SECRETBOX_NONCE_BYTES>()?;
                cipher.decrypt(GenericArray::from_slice(nonce), text).ok()
            }
        }
    }
}

fn encrypt_cbc(key: &[u8], iv: &[u8], plain: &[u8]) -> Option<Vec<u8>> {
    Some(match key.len() {
        16 => cbc::Encryptor::<aes::Aes128>::new_from_slices(key, iv)
            .ok()?
            .encrypt_padded_vec_mut::<Pkcs7>(plain),
        24 => cbc::Encryptor::<aes::Aes192>::new_from_slices(key, iv)
            .ok()?
            .encrypt_padded_vec_mut::<Pkcs7>(plain),
        _ => cbc::Encryptor::<aes::Aes256>::new_from_slices(key, iv)
            .ok()?
            .encrypt_padded_vec_mut::<Pkcs7>(plain),
    })
}

fn decrypt_cbc(key: &[u8], iv: &[u8], text: &[u8]) -> Option<Vec<u8>> {
    match key.len() {
        16 => cbc::Decryptor::<aes::Aes128>::new_from_slices(key, iv)
            .ok()?
            .decrypt_padded_vec_mut::<Pkcs7>(text),
        24 => cbc::Decryptor::<aes::Aes192>::new_from_slices(key, iv)
            .ok()?
            .decrypt_padded_vec_mut::<Pkcs7>(text),
        _ => cbc::Decryptor::<aes::Aes256>::new_from_slices(key, iv)
            .ok()?
            .decrypt_padded_vec_mut::<Pkcs7>(text),
    }
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        ::hex::decode(text.replace(' ', "")).unwrap()
    }

    #[test]
    fn ciphers_agree_with_published_vectors() {
        // NIST SP 800-38A, F.2.5: the first block of CBC-AES256; the padding follows it.
        let key = hex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4");
        let iv = hex("000102030405060708090a0b0c0d0e0f");
        let plain = hex("6bc1bee22e409f96e93d7e117393172a");
        let text = encrypt_cbc(&key, &iv, &plain).unwrap();
        assert_eq!(text[..16], hex("f58c4c04d6e5f1ba779eabfb5f7bfbd6"));
        assert_eq!(decrypt_cbc(&key, &iv, &text).unwrap(), plain);
        // The first bytes of NaCl's test vector for secretbox (tests/secretbox.c).
        let key = hex("1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389");
        let nonce = hex("69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37");
        let plain = hex(
            "be075fc53c81f2d5cf141316ebeb0c7b5228c52a4c62cbd44b66849b64244ffce5ecbaaf33bd751a1ac728d45e6c61296cdc3c01233561f41db66cce314adb310e3be8250c46f06dceea3a7fa1348057e2f6556ad6b1318a024a838f21af1fde048977eb48f59ffd4924ca1c60902e52f0a089bc76897040e082f937763848645e0705",
        );
        let cipher = XSalsa20Poly1305::new_from_slice(&key).unwrap();
        let text = cipher.encrypt(GenericArray::from_slice(&nonce), plain.as_slice()).unwrap();
        assert_eq!(text[..16], hex("f3ffc7703f9400e52a7dfb4b3d3305d9"));
        // The NIST vectors have no associated data, so this tests the round trip and the context.
        let key = gcm::key(&[7; 16]).unwrap();
        let sealed = gcm::seal(&key, b"a", b"here").unwrap();
        assert_eq!(gcm::open(&key, &sealed, b"here").unwrap(), b"a");
        assert_eq!(gcm::open(&key, &sealed, b"there"), None);
        // GCM's specification (McGrew and Viega), test case 10: a key of 24 bytes, with associated data.
        let key = gcm::key_192(&hex("feffe9928665731c6d6a8f9467308308feffe9928665731c")).unwrap();
        let sealed = hex(
            "cafebabefacedbaddecaf888 3980ca0b3c00e841eb06fac4872a2757859e1ceaa6efd984628593b40ca1e19c7d773d00c144c525ac619d18c84a3f4718e2448b2fe324d9ccda2710 2519498e80f1478f37ba55bd6d27618c",
        );
        let context = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let plain = hex(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        );
        assert_eq!(gcm::open_192(&key, &sealed, &context).unwrap(), plain);
        assert_eq!(gcm::open_192(&key, &sealed, b"there"), None);
    }

    #[test]
    fn keys_have_the_sizes_of_their_cipher_and_damage_is_found() {
        for (scheme, sizes) in
            [(Scheme::AesCbc, &[16, 24, 32][..]), (Scheme::AesGcm, &[16, 24, 32]), (Scheme::Secretbox, &[32])]
        {
            for size in 0..40 {
                let key = scheme.key("k".to_owned(), &vec![1; size]);
                assert_eq!(key.is_ok(), sizes.contains(&size), "{scheme:?} {size}");
                let Ok(key) = key else { continue };
                let provider = Provider::Keys(scheme, vec![key]);
                let sealed = provider.seal(b"value", b"name").unwrap().unwrap();
                assert!(sealed.starts_with(format!("k8s:enc:{}:v1:k:", scheme.name()).as_bytes()));
                assert!(provider.is_current(&sealed));
                assert_eq!(provider.open(&sealed, b"name").unwrap().unwrap(), b"value");
                for cut in 0..sealed.len() {
                    assert!(
                        provider.open(&sealed[..cut], b"name").is_none_or(|opened| opened.is_err()),
                        "{cut}"
                    );
                }
                assert!(provider.open(b"k8s:enc:other:v1:k:", b"name").is_none());
            }
        }
    }
}
