//! Certificates, keys and settings of TLS.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};

use crate::config::Config;
use crate::error::Error;

/// Reads the files that the configuration names.
pub(crate) fn load(config: &Config) -> Result<Arc<ServerConfig>, Error> {
    let error = |text: String| Error::Tls(text);
    let provider = Arc::new(default_provider());
    let chain = certificates(&config.get("tls-cert-file"))?;
    let key = config.get("tls-key-file");
    let key =
        PrivateKeyDer::from_pem_slice(&read(&key)?).map_err(|e| error(format!("{key}: {e}")))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&versions(&config.get("tls-protocols")))
        .map_err(|e| error(e.to_string()))?;
    let builder = match config.get("tls-auth-clients").as_str() {
        "no" => builder.with_no_client_auth(),
        wanted => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(&config.get("tls-ca-cert-file"))? {
                roots.add(certificate).map_err(|e| error(e.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            let verifier = match wanted {
                "optional" => verifier.allow_unauthenticated(),
                _ => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| error(e.to_string()))?)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(|e| error(e.to_string()))?;
    Ok(Arc::new(config))
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let error = |e: rustls::pki_types::pem::Error| Error::Tls(format!("{file}: {e}"));
    let text = read(file)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.map_err(error)?;
    if all.is_empty() {
        return Err(Error::Tls(format!("{file}: the file has no certificate")));
    }
    Ok(all)
}

fn read(file: &str) -> Result<Vec<u8>, Error> {
    units::files::read(file.as_ref()).map_err(|e| Error::Tls(format!("{file}: {e}")))
}

fn versions(wanted: &str) -> Vec<&'static SupportedProtocolVersion> {
    let all = [("TLSv1.2", &TLS12), ("TLSv1.3", &TLS13)];
    let is_wanted = |name: &str| wanted.is_empty() || wanted.contains(name);
    all.into_iter().filter(|(name, _)| is_wanted(name)).map(|(_, version)| version).collect()
}

/// A socket as rustls reads and writes it.
pub(crate) struct Socket<'a>(pub BorrowedFd<'a>);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, into)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, from, rustix::net::SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
