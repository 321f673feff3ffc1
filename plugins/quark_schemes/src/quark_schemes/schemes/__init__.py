"""The named schemes: functions that build a fresh layer configuration. No torch here."""
