"""The app that sends mails."""
